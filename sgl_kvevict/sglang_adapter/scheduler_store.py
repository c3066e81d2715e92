"""The store of one scheduler: its identity, and queued requests that wait for it."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from sgl_kvevict.cache.saving import StoreAccess
from sgl_kvevict.config import KVEvictConfig
from sgl_kvevict.errors import UnsupportedSetupError
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.sglang_adapter.distilling import model_fingerprint, rotary_of
from sgl_kvevict.sglang_adapter.ranks import TensorRanks
from sgl_kvevict.sglang_adapter.settings import has_weights
from sgl_kvevict.sglang_adapter.tree import KVEvictTree
from sgl_kvevict.store.identity import StoreIdentity
from sgl_kvevict.store.reader import ReadAhead
from sgl_kvevict.store.segments import SegmentStore, open_backend
from sgl_kvevict.store.writer import WriteBehind

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sgl_kvevict.sglang_adapter.draft_attention import DraftAttentionBackend

logger = logging.getLogger(__name__)

IDLE_WAIT_S = 0.0005
"""Sleep of the scheduler, to let other threads run, when all requests wait for the store."""
ROTARY_POSITIONS = 256
NEVER_IN_KV = frozenset(
    {
        "context_len",  # SGLang's note of --context-length
        "max_position_embeddings",  # rope scaling that depends on it is in the rotary embedding's table
        "transformers_version",
        *("dtype", "torch_dtype"),  # what the model computes with is apart
        *("bos_token_id", "eos_token_id", "pad_token_id", "id2label", "label2id", "problem_type"),
        *("use_cache", "return_dict", "output_attentions", "output_hidden_states"),
        *("initializer_range", "attention_dropout"),  # of training
        *("encoder_only", "language_only", "language_model_only"),  # SGLang's notes of its flags
    }
)
"""Fields of a model's configuration that change neither keys nor values of tokens: servers that differ in them share a
store."""


def open_access(
    config: KVEvictConfig,
    ctx: TreeCacheBuildContext,
    geometry: KVGeometry,
    dtype: torch.dtype,
    drafts: DraftAttentionBackend | None = None,
    statistics: str = "",
) -> StoreAccess | None:
    """Open the configured store; None if there is none.

    ``drafts``: attention of the draft model. ``statistics``: see :class:`StoreIdentity`; if they are still to be
    learned, :func:`read_with` follows.

    Raises:
        UnsupportedSetupError: the model has no files that identify it.
        ConfigError: the store's URL needs a package that is not installed.
        StoreError: the store's folder cannot be created.
    """
    if config.store is None:
        return None
    ranks = TensorRanks(ctx.params.attn_tp_cache_group)
    identity = identity_of(config, ctx.tp_worker.model_runner, ranks, geometry, dtype)
    if identity is None:
        raise UnsupportedSetupError([f"store is {config.store!r}: the model has no safetensors files to know it by"])
    draft = None
    if drafts is not None:
        draft = identity_of(config, drafts.runner, ranks, drafts.geometry, drafts.arena.k.dtype)
        if draft is None and ranks.is_first:
            logger.warning("kvevict: the draft model has no safetensors files to know it by: its rows are not stored")
    backend = open_backend(config.store, config.store_bytes)
    segments = SegmentStore(backend, identity, draft=draft)
    # Now, so that a folder that cannot be made is an error of the start, and not of the first write.
    segments.backend.create()
    reader = ReadAhead(segments, config.store_wait_ms / 1000) if config.store_wait_ms else None
    access = StoreAccess(segments, WriteBehind(segments), reader)
    read_with(access, statistics)
    return access


def read_with(access: StoreAccess, statistics: str) -> None:
    """From now on, before the first request, segments are those that are read with these statistics (their hash)."""
    segments = access.segments
    segments.identity = replace(segments.identity, statistics=statistics)
    logger.info("kvevict: prefixes are kept in %s as those of %s", segments.backend.url, segments.identity.digest[:16])


def identity_of(
    config: KVEvictConfig, runner: ModelRunner, ranks: TensorRanks, geometry: KVGeometry, dtype: torch.dtype
) -> StoreIdentity | None:
    """Everything that must be equal for another server to use rows that this one stores of a model, or a draft model.

    ``geometry`` and ``dtype`` are those of its pool. None: it has no files that identify it.
    """
    model, rotary = runner.model_config, rotary_of(runner)
    fingerprint = model_fingerprint(model.model_path, model.revision) if has_weights(runner) else None
    if fingerprint is None:
        return None
    # Settings that decide which entries of a range are kept; a server with others would read segments that it would not
    # have made.
    kept = ("policy", "policy_options", "budget", "bits", "tail_tokens", "sink_tokens")
    policy = {name: getattr(config, name) for name in kept} | {"shares": config.shares}
    # The first rows tell embeddings apart. How many rows there are depends on --context-length, which changes no key.
    turned = rotary.cos_sin[:ROTARY_POSITIONS].to("cpu", torch.float16).contiguous()
    turns = hashlib.sha256(f"{tuple(turned.shape)} {rotary.is_neox} {rotary.start}".encode() + turned.numpy().tobytes())
    architectures = " ".join(model.hf_config.architectures or ())
    settings = hashlib.sha256(settings_of(model.hf_config).encode()).hexdigest()[:16]
    return StoreIdentity(
        model=fingerprint,
        architecture=f"{architectures}, {model.dtype}, quantization {model.quantization}, settings {settings}",
        dtype=str(dtype),
        scales=(*geometry.scales.k, *geometry.scales.v),
        num_layers=geometry.num_layers,
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        own_value_dim=geometry.own_value_dim,
        rotary=turns.hexdigest(),
        rank=ranks.rank,
        num_ranks=ranks.size,
        policy=json.dumps(policy, sort_keys=True, default=str),
        min_prefix_tokens=config.min_prefix_tokens,
        sink_tokens=config.sink_tokens,
    )


def settings_of(hf_config: Any) -> str:
    """The model's configuration with command-line overrides, as far as it may change keys and values."""
    return json.dumps(_relevant(hf_config.to_dict()), sort_keys=True, default=str)


def _relevant(values: dict[str, Any]) -> dict[str, Any]:
    """Without paths and :data:`NEVER_IN_KV`, in the configurations of a model's parts too."""
    return {
        name: _relevant(value) if isinstance(value, dict) else value
        for name, value in values.items()
        if not str(name).startswith("_") and name not in NEVER_IN_KV
    }


def fetch(scheduler: Scheduler, req: Req) -> None:
    """Fetch what the store has of a queued request's prompt; nothing with an adapter."""
    tree = scheduler.tree_cache
    loading = tree.prefixes.loading if isinstance(tree, KVEvictTree) else None
    # An adapter's id is new after each load, so no stored prefix could be named by it.
    if loading is None or req.lora_id is not None or req.to_finish is not None:
        return
    if req.positional_embed_overrides is not None or tree.prefixes.readers.is_exact(req):
        return  # of the former SGLang matches nothing
    loading.queued(req, tree.prompt_of(req, req.origin_input_ids))


def without_waiting(original: Callable[..., Any], scheduler: Scheduler, *args: Any, **kwargs: Any) -> Any:
    """Choose the next prefill without requests that wait for the store.

    They stay in the queue for aborts, flushes and counts, as in SGLang's own fetches from storage.
    """
    tree = scheduler.tree_cache
    loading = tree.prefixes.loading if isinstance(tree, KVEvictTree) else None
    waiting = set() if loading is None else loading.settle(scheduler.waiting_queue)
    if not waiting:
        return original(scheduler, *args, **kwargs)
    queue = list(scheduler.waiting_queue)
    scheduler.waiting_queue = [req for req in queue if req not in waiting]
    # The loop would spin, and take the interpreter's lock from the threads that fetch.
    if not scheduler.waiting_queue and scheduler.running_batch.is_empty() and scheduler.chunked_req is None:
        time.sleep(IDLE_WAIT_S)
    try:
        return original(scheduler, *args, **kwargs)
    finally:
        # Also after an exception: requests that were left out would never be answered. All keep their places; what came
        # meanwhile, as a request that was retracted, is behind them.
        left = dict.fromkeys(scheduler.waiting_queue)
        scheduler.waiting_queue = [req for req in dict.fromkeys([*queue, *left]) if req in waiting or req in left]
