"""Starts the configured listeners: totals, event socket, metrics."""

from __future__ import annotations

import logging
import time
from importlib.metadata import version

from sglang.srt.disaggregation.kv_events import (
    ZmqEventPublisher,
    is_kv_publisher_rank,
    select_kv_publisher_dp_rank,
)
from sglang.srt.runtime_context import get_parallel

from sgl_kvevict.cache.listener import CacheListener
from sgl_kvevict.config import EventsConfig, KVEvictConfig
from sgl_kvevict.events.questions import Description
from sgl_kvevict.events.service import EventService
from sgl_kvevict.events.totals import Totals
from sgl_kvevict.sglang_adapter.monitoring.inspection import Inspection
from sgl_kvevict.sglang_adapter.settings import ServerSettings
from sgl_kvevict.sglang_adapter.tree import KVEvictTree

logger = logging.getLogger(__name__)


def start_monitoring(
    tree: KVEvictTree, config: KVEvictConfig, settings: ServerSettings, *, enable_metrics: bool
) -> None:
    """Give the tree its configured listeners; raises :class:`ConfigError` if the event address cannot be bound."""
    events, totals, started = config.events, Totals(), time.time()
    listener = CacheListener(
        tree.guard, totals, policy=config.policy, exposes_tokens=events is not None and events.expose_tokens
    )
    if events is not None and is_kv_publisher_rank("kvevict"):  # any text: this asks for the rank only
        service = _start_service(config, events, tree, settings, started, totals)
        listener.subscribers.append(service.publish)
        listener.each_turn.append(Inspection(tree, service, started).each_turn)
    if enable_metrics:
        # Imported here: prometheus_client decides at import whether several processes share the metrics.
        from sgl_kvevict.sglang_adapter.monitoring.metrics import Metrics

        metrics = Metrics(tree, totals, {name: str(value) for name, value in tree.metrics_collector.labels.items()})
        listener.subscribers.append(metrics.observe)
        listener.each_turn.append(metrics.each_turn)
    tree.prefixes.listener = listener


def _start_service(
    config: KVEvictConfig,
    events: EventsConfig,
    tree: KVEvictTree,
    settings: ServerSettings,
    started: float,
    totals: Totals,
) -> EventService:
    parallel = get_parallel()
    geometry = tree.packer.geometry
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
        model=settings.model_path,
        tokenizer=settings.tokenizer_path,
        expose_tokens=events.expose_tokens,
    )
    service = EventService(events, description, rank, tree.guard, totals)
    logger.info("kvevict: events and inspection on %s", events.endpoint)
    return service


def events_of_rank(events: EventsConfig, rank: int) -> EventsConfig:
    """Return the configuration of one data-parallel scheduler: its rank is added to the port or the IPC path."""
    endpoint = events.endpoint
    if endpoint.startswith("ipc://"):
        endpoint = f"{endpoint}_dp{rank}" if rank else endpoint
    else:
        endpoint = ZmqEventPublisher.offset_endpoint_port(endpoint, rank)
    return events.model_copy(update={"endpoint": endpoint})
