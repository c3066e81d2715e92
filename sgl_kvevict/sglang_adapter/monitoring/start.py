"""Starts the configured listeners: totals, event stream, inspection socket, metrics."""

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
from sgl_kvevict.events.totals import Totals
from sgl_kvevict.lifecycle.listener import CacheListener
from sgl_kvevict.sglang_adapter.monitoring.inspection import Inspection
from sgl_kvevict.sglang_adapter.settings import ServerSettings
from sgl_kvevict.sglang_adapter.tree import KVEvictTree

logger = logging.getLogger(__name__)


def start_monitoring(
    tree: KVEvictTree, config: KVEvictConfig, settings: ServerSettings, *, enable_metrics: bool
) -> None:
    """Give the tree its configured listeners; raises :class:`ConfigError` if an event address cannot be bound."""
    events, totals, started = config.events, Totals(), time.time()
    listener = CacheListener(
        tree.guard, totals, policy=config.policy, exposes_tokens=events is not None and events.expose_tokens
    )
    if events is not None and is_kv_publisher_rank("kvevict"):  # any text: this asks for the rank only
        service = _start_service(config, events, tree, settings, started, totals)
        if events.endpoint is not None:
            listener.subscribers.append(service.publish)
        if events.inspect_endpoint is not None:
            listener.each_turn.append(Inspection(tree, service, started).each_turn)
    if enable_metrics:
        # Imported here: prometheus_client decides at import whether several processes share the metrics.
        from sgl_kvevict.sglang_adapter.monitoring.metrics import Metrics

        metrics = Metrics(tree, totals, {name: str(value) for name, value in tree.metrics_collector.labels.items()})
        listener.subscribers.append(metrics.observe)
        listener.each_turn.append(metrics.each_turn)
    tree.manager.listener = listener


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
        num_layers=geometry.num_layers,
        num_kv_heads=geometry.num_kv_heads,
        model=settings.model_path,
        tokenizer=settings.tokenizer_path,
        endpoint=events.endpoint,
        replay_endpoint=events.replay_endpoint,
        topic=events.topic,
        next_seq=0,
        expose_tokens=events.expose_tokens,
    )
    service = EventService(events, description, rank, tree.guard, totals)
    logger.info(
        "kvevict: events on %s, replay on %s, inspection on %s",
        *(address or "no socket" for address in (events.endpoint, events.replay_endpoint, events.inspect_endpoint)),
    )
    return service


def events_of_rank(events: EventsConfig, rank: int) -> EventsConfig:
    """Return the configuration of one data-parallel scheduler: its rank is added to ports and IPC paths."""

    def address(base: str | None) -> str | None:
        if base is not None and base.startswith("ipc://"):
            return f"{base}_dp{rank}" if rank else base
        offset: str | None = ZmqEventPublisher.offset_endpoint_port(base, rank)
        return offset

    return events.model_copy(
        update={name: address(getattr(events, name)) for name in ("endpoint", "replay_endpoint", "inspect_endpoint")}
    )
