"""The store of one scheduler: whose segments it keeps, which requests wait for it."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from sgl_kvevict.config import KVEvictConfig
from sgl_kvevict.errors import UnsupportedSetupError
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.lifecycle.stored import Adoption
from sgl_kvevict.lifecycle.storing import StoredPrefixes
from sgl_kvevict.policies.rotary import Rotary
from sgl_kvevict.sglang_adapter.distilling import model_fingerprint, rotary_of
from sgl_kvevict.sglang_adapter.tree import KVEvictTree
from sgl_kvevict.store import ReadAhead, SegmentStore, StoreIdentity, WriteBehind, open_backend

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext

logger = logging.getLogger(__name__)

IDLE_WAIT_S = 0.0005
"""How long the scheduler lets other threads run when all it could do is wait for the store."""
ROTARY_POSITIONS = 256


def use_store(tree: KVEvictTree, config: KVEvictConfig, ctx: TreeCacheBuildContext) -> None:
    """Connect a tree with the configured store, if there is one.

    Raises:
        UnsupportedSetupError: there are several tensor-parallel ranks, or the model cannot be told from others.
        ConfigError: the store's URL needs what is not installed.
        StoreError: the store's folder cannot be made.
    """
    manager = tree.manager
    if config.store is None or tree.compressor is None or manager.ranges is None:
        return
    reasons = []
    if tree.ranks.size > 1:
        reasons.append(f"store is {config.store!r} with --tp-size {tree.ranks.size}: only one rank is supported")
    dummy = ctx.server_args.load_format == "dummy"
    fingerprint = None if dummy else model_fingerprint(ctx.model_config.model_path, ctx.model_config.revision)
    if fingerprint is None:
        reasons.append(f"store is {config.store!r}: the model has no safetensors files to know it by")
    if reasons:
        raise UnsupportedSetupError(reasons)
    assert fingerprint is not None
    rotary = rotary_of(ctx.tp_worker.model_runner.model, ctx.model_config.context_len, tree.store.k_arena.device)
    identity = identity_of(config, ctx, tree.store.geometry, tree.store.k_arena.dtype, fingerprint, rotary)
    segments = SegmentStore(open_backend(config.store, config.store_bytes), identity)
    stored = StoredPrefixes(
        tree.port,
        manager.spans,
        tree.store,
        Adoption(tree.port, manager.spans, manager.ranges, manager.readers, tree.store),
        identity,
        WriteBehind(segments),
        ReadAhead(segments, config.store_wait_ms / 1000) if config.store_wait_ms else None,
        tree.guard,
        config.tail_tokens,
    )
    manager.use_store(stored)
    logger.info("kvevict: prefixes are kept in %s as those of %s", segments.backend.url, identity.digest[:16])


def identity_of(
    config: KVEvictConfig,
    ctx: TreeCacheBuildContext,
    geometry: KVGeometry,
    dtype: torch.dtype,
    fingerprint: str,
    rotary: Rotary,
) -> StoreIdentity:
    """Everything that must be the same for another server to use what this one stores."""
    model = ctx.model_config
    kept = ("policy", "policy_options", "budget", "budget_includes_tail", "tail_tokens", "sink_tokens")
    policy = {name: getattr(config, name) for name in kept} | {"shares": config.shares}
    if config.fit:
        policy["fit_scope"] = config.fit_scope
    turned = rotary.cos_sin[:ROTARY_POSITIONS].to("cpu", torch.float16).contiguous()
    turns = hashlib.sha256(f"{tuple(turned.shape)} {rotary.is_neox}".encode() + turned.numpy().tobytes())
    architectures = " ".join(model.hf_config.architectures or ())
    return StoreIdentity(
        model=fingerprint,
        architecture=f"{architectures}, {model.dtype}, quantization {model.quantization}",
        dtype=str(dtype),
        scales=(*geometry.scales.k, *geometry.scales.v),
        num_layers=geometry.num_layers,
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        rotary=turns.hexdigest(),
        rank=0,
        num_ranks=1,
        policy=json.dumps(policy, sort_keys=True, default=str),
        min_prefix_tokens=config.min_prefix_tokens,
    )


def after_queueing(
    _result: None, scheduler: Scheduler, req: Req, is_retracted: bool = False, *_args: object, **_kwargs: object
) -> None:
    """Hook after a request was queued: what the store knows of its prompt is fetched while it waits."""
    tree = scheduler.tree_cache
    stored = tree.manager.stored if isinstance(tree, KVEvictTree) else None
    if stored is None or is_retracted or req.to_finish is not None or tree.manager.readers.is_exact(req):
        return
    stored.queued(req, list(req.origin_input_ids[:-1]), req.extra_key, req.cache_salt or None)


def around_admission(original: Callable[..., Any], scheduler: Scheduler, *args: Any, **kwargs: Any) -> Any:
    """Hook around the choice of what is prefilled next: requests that wait for the store are passed over.

    So does SGLang with requests whose pages it fetches from a storage of its own. Meanwhile they stay in the queue for
    everybody else: for aborts, flushes and counts.
    """
    tree = scheduler.tree_cache
    stored = tree.manager.stored if isinstance(tree, KVEvictTree) else None
    waiting = set() if stored is None else stored.settle()
    if not waiting:
        return original(scheduler, *args, **kwargs)
    queue = list(scheduler.waiting_queue)
    scheduler.waiting_queue = [req for req in queue if req not in waiting]
    if not scheduler.waiting_queue and scheduler.running_batch.is_empty() and scheduler.chunked_req is None:
        time.sleep(IDLE_WAIT_S)
    try:
        return original(scheduler, *args, **kwargs)
    finally:
        scheduler.waiting_queue = in_order(queue, waiting, scheduler.waiting_queue)


def in_order(before: list[Req], waiting: set[Req], left: list[Req]) -> list[Req]:
    """The queue after some of it were admitted: who waited keeps the place before those who came after."""
    order = {req: number for number, req in enumerate(before)}
    rest = [req for req in before if req in waiting]
    merged: list[Req] = []
    for req in left:
        while rest and order[rest[0]] < order.get(req, len(before)):
            merged.append(rest.pop(0))
        merged.append(req)
    return merged + rest
