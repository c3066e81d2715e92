"""Starts what the configuration asks for: the event socket, metrics."""

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

from sgl_kvevict.config import EventsConfig, KVEvictConfig
from sgl_kvevict.events.questions import Description
from sgl_kvevict.events.service import EventService
from sgl_kvevict.sglang_adapter.monitoring.inspection import Inspection
from sgl_kvevict.sglang_adapter.settings import ServerSettings
from sgl_kvevict.sglang_adapter.tree import KVEvictTree

logger = logging.getLogger(__name__)


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
    parallel, settings, geometry = get_parallel(), ServerSettings.read(), tree.packer.geometry
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
