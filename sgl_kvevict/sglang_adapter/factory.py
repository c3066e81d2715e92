"""Builds the tree, after checking that all of our parts are in place."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.registry import create_unified_radix_cache

from kvevict_kernels.recode_rows import prepare_on_cpu
from sgl_kvevict.config import KVEvictConfig, load_config
from sgl_kvevict.errors import InvariantError
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.policies.by_name import NO_POLICY, configured_policy
from sgl_kvevict.policies.policy import Policy
from sgl_kvevict.policies.signals import Signal
from sgl_kvevict.segments import Compressor, SegmentPacker, SideStream, warm_up
from sgl_kvevict.sglang_adapter.attention_backend import KVEvictAttentionBackend
from sgl_kvevict.sglang_adapter.compat import require_supported_sglang
from sgl_kvevict.sglang_adapter.distilling import Distilling
from sgl_kvevict.sglang_adapter.draft_attention import DraftAttentionBackend, draft_attention_of
from sgl_kvevict.sglang_adapter.host_memory import open_host
from sgl_kvevict.sglang_adapter.kv_pools import full_pool_of, window_pool_of
from sgl_kvevict.sglang_adapter.monitoring.start import start_monitoring
from sgl_kvevict.sglang_adapter.scheduler_store import open_access
from sgl_kvevict.sglang_adapter.settings import published
from sgl_kvevict.sglang_adapter.tree import KVEvictTree
from sgl_kvevict.support import SETTINGS, BeforeLoad, require

if TYPE_CHECKING:
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext

logger = logging.getLogger(__name__)


def build_tree(ctx: TreeCacheBuildContext) -> KVEvictTree:
    """Build the compressed tree of one scheduler (SGLang's radix-cache factory ``kvevict``).

    Checks the settings again. SGLang may override what was given, and it only logs a part of a plugin that fails to
    load, such as the one that checks settings before the load.

    Raises:
        UnsupportedSetupError: lists every unsupported setting.
        ConfigError: the configuration is invalid.
    """
    require_supported_sglang()
    config = load_config()
    policy = configured_policy(config)
    require(SETTINGS, BeforeLoad(published, config))
    built = ctx.tp_worker.model_runner.attn_backend
    # SGLang wraps the full-attention backend if the model also has recurrent layers.
    backend = getattr(built, "full_attn_backend", built)
    if not isinstance(backend, KVEvictAttentionBackend):  # what was published says that it is ours
        raise InvariantError(f"SGLang has built {type(backend).__name__} for our attention backend")
    # From here on ``auto`` is decided, for store, log and inspection alike.
    config = config.model_copy(update={"bits": backend.bits})
    if backend.why_whole_answers:
        config = config.model_copy(update={"answer_block": None})
    drafts = draft_attention_of(full_pool_of(ctx.params.token_to_kv_pool_allocator.get_kvcache()))
    tree = _assemble(ctx, config, policy, backend, drafts)
    # Both need each other, and SGLang builds the backend first.
    backend.tree = tree
    if drafts is not None:
        drafts.tree = tree
    start_monitoring(tree, config, enable_metrics=ctx.params.enable_metrics and tree.ranks.is_first)
    if not tree.ranks.is_first:
        return tree
    logger.info("kvevict: %s", describe(config, backend.geometry, tree.ranks.size))
    if policy is not None and backend.why_16_bits:
        logger.info("kvevict: rows of compressed prefixes have 16 bits, because %s", "; ".join(backend.why_16_bits))
    if backend.why_whole_answers:
        logger.info(
            "kvevict: answers are compressed with the next prompt, because %s", "; ".join(backend.why_whole_answers)
        )
    caution = None if policy is None else policy.caution(backend.geometry.num_kv_heads)
    if caution is not None:
        logger.warning("kvevict: policy %s: %s", config.policy, caution)
    return tree


def describe(config: KVEvictConfig, geometry: KVGeometry, num_ranks: int) -> str:
    """Return the resolved configuration in one line."""
    fields = ", ".join(f"{name}={value!r}" for name, value in config.model_dump().items())
    return (
        f"{fields}; {geometry.num_token_slots - 1} token slots, "
        f"{geometry.num_layers} layers x {geometry.num_kv_heads} KV heads"
        f"{f' on each of {num_ranks} ranks' if num_ranks > 1 else ''}"
    )


def _assemble(
    ctx: TreeCacheBuildContext,
    config: KVEvictConfig,
    policy: Policy | None,
    backend: KVEvictAttentionBackend,
    drafts: DraftAttentionBackend | None,
) -> KVEvictTree:
    geometry, arena = backend.geometry, backend.arena
    packer = SegmentPacker(geometry, arena.k, arena.v, None if drafts is None else drafts.rows, backend.coding)
    distilling = access = None
    compressor = Compressor(config, NO_POLICY, packer)
    if policy is not None:
        needs_scores = Signal.LEARNED_SCORES in policy.needs
        statistics = None if backend.coding is None else backend.coding.statistics
        if needs_scores or statistics is not None:
            distilling = Distilling(
                config, ctx, geometry, arena.k.device, needs_scores=needs_scores, statistics=statistics
            )
        learned = distilling.learned if distilling is not None and needs_scores else None
        # A pool for windows may replace an uncompressed node's slots, which a choice would still be reading.
        is_alone = arena.k.is_cuda and window_pool_of(ctx.params.token_to_kv_pool_allocator.get_kvcache()) is None
        stream = SideStream(arena.k.device) if is_alone else None
        compressor = Compressor(config, policy, packer, learned, backend.slot_positions, stream)
        if arena.k.is_cuda:
            # No kernel may be compiled while requests wait.
            warm_up(compressor, ctx.tp_worker.model_runner.dtype)
        elif backend.coding is not None:
            prepare_on_cpu(geometry.head_dim)
        access = open_access(
            config, ctx, geometry, arena.k.dtype, drafts, "" if distilling is None else distilling.digest
        )
    host = open_host(config, ctx, packer)
    # SGLang calls the class with its own arguments only.
    ours = partial(KVEvictTree, compressor=compressor, host=host, access=access, distilling=distilling)
    tree = create_unified_radix_cache(ctx, cache_class=ours)
    assert isinstance(tree, KVEvictTree)
    return tree
