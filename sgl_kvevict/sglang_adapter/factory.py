"""Builds the tree, after checking that all of our parts are in place, and opens the event socket and metrics."""

from __future__ import annotations

import logging
import time
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING

from sglang.srt.disaggregation.kv_events import ZmqEventPublisher, is_kv_publisher_rank, select_kv_publisher_dp_rank
from sglang.srt.mem_cache.registry import create_unified_radix_cache
from sglang.srt.runtime_context import get_parallel

from kvevict_kernels.span_attention import prepare_on_cpu
from sgl_kvevict.config import EventsConfig, KVEvictConfig, load_config
from sgl_kvevict.errors import InvariantError
from sgl_kvevict.events.questions import Description
from sgl_kvevict.events.service import EventService
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.policies.by_name import NO_POLICY, build_policy
from sgl_kvevict.policies.policy import Policy
from sgl_kvevict.policies.signals import Signal
from sgl_kvevict.segments.packer import SegmentPacker
from sgl_kvevict.segments.ranker import Compressor
from sgl_kvevict.segments.streams import SideStream
from sgl_kvevict.segments.warm_up import warm_up
from sgl_kvevict.sglang_adapter.attention_backend import KVEvictAttentionBackend
from sgl_kvevict.sglang_adapter.compat import require_supported_sglang
from sgl_kvevict.sglang_adapter.distilling import Distilling
from sgl_kvevict.sglang_adapter.draft_attention import DraftAttentionBackend
from sgl_kvevict.sglang_adapter.host_memory import open_host
from sgl_kvevict.sglang_adapter.kv_pools import full_pool_of, window_pool_of
from sgl_kvevict.sglang_adapter.monitoring.inspection import Inspection
from sgl_kvevict.sglang_adapter.scheduler_store import open_access
from sgl_kvevict.sglang_adapter.settings import published, tokenizer_path
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
    policy = build_policy(config.policy, config.policy_options)
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
    pool = full_pool_of(ctx.params.token_to_kv_pool_allocator.get_kvcache())
    drafts: DraftAttentionBackend | None = getattr(pool, "kvevict_drafts", None)
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
    caution = None if policy is None else policy.scorer.caution(backend.geometry.num_kv_heads)
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
        else:
            if backend.coding is not None:
                prepare_on_cpu("recode_rows.numba_impl", geometry.head_dim)
            if learned is not None:
                prepare_on_cpu("numba_products", geometry.head_dim)
        access = open_access(
            config, ctx, geometry, arena.k.dtype, drafts, "" if distilling is None else distilling.digest
        )
    host = open_host(config, ctx, packer)
    # SGLang calls the class with its own arguments only.
    ours = partial(KVEvictTree, compressor=compressor, host=host, access=access, distilling=distilling)
    tree = create_unified_radix_cache(ctx, cache_class=ours)
    assert isinstance(tree, KVEvictTree)
    return tree


def start_monitoring(tree: KVEvictTree, config: KVEvictConfig, *, enable_metrics: bool) -> None:
    """Start the event socket and metrics, as configured; :class:`ConfigError` if the socket cannot be bound."""
    events, started, watchers = config.events, time.time(), tree.prefixes.watchers
    if events is not None and is_kv_publisher_rank("kvevict"):  # any text: this asks for the rank only
        service = _start_service(tree, config, events, started)
        watchers.append(Inspection(tree, service, started).each_turn)
    if enable_metrics:
        # Imported here: prometheus_client decides at import whether several processes share the metrics.
        from sgl_kvevict.sglang_adapter.monitoring.metrics import Metrics

        metrics = Metrics(tree, {name: str(value) for name, value in tree.metrics_collector.labels.items()})
        watchers.append(metrics.each_turn)


def _start_service(tree: KVEvictTree, config: KVEvictConfig, events: EventsConfig, started: float) -> EventService:
    parallel, geometry = get_parallel(), tree.packer.geometry
    rank = select_kv_publisher_dp_rank(parallel.attn_dp_size, parallel.attn_dp_rank, parallel.dp_rank)
    events = events_of_rank(events, rank)
    description = Description(
        started=started,
        version=version("sgl-kvevict"),
        policy=config.policy,
        budget=config.budget,
        bits=config.bits,
        slot_bytes=geometry.slot_bytes,
        num_layers=geometry.num_layers,
        num_kv_heads=geometry.num_kv_heads,
        model=str(published("model_path")),
        tokenizer=tokenizer_path(),
        expose_tokens=events.expose_tokens,
    )
    service = EventService(events, description, tree.guard)
    logger.info("kvevict: inspection on %s", events.endpoint)
    return service


def events_of_rank(events: EventsConfig, rank: int) -> EventsConfig:
    """Return the configuration of one data-parallel scheduler: its rank is added to the port or the IPC path."""
    endpoint = events.endpoint
    if endpoint.startswith("ipc://"):
        # Rank 0 keeps the configured name, so that a server without data parallelism has it.
        endpoint = f"{endpoint}_dp{rank}" if rank else endpoint
    else:
        endpoint = ZmqEventPublisher.offset_endpoint_port(endpoint, rank)
    return events.model_copy(update={"endpoint": endpoint})
