# ruff: noqa: D102 - the base class describes the methods
"""Prometheus metrics on SGLang's own ``/metrics`` endpoint, with the labels of its radix-cache metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import Counter, Gauge, Histogram

from sgl_kvevict.compression import Compression
from sgl_kvevict.events.questions import Gauges, Totals
from sgl_kvevict.guard import Place
from sgl_kvevict.lifecycle.listener import CacheListener
from sgl_kvevict.lifecycle.nodes import Node
from sgl_kvevict.sglang_adapter.monitoring.gauges import read_gauges

if TYPE_CHECKING:
    from sgl_kvevict.sglang_adapter.tree import KVEvictTree

PREFIX = "kvevict:"
REFRESH_S = 1.0

GAUGES: Mapping[str, tuple[str, Callable[[Gauges], float]]] = {
    "logical_tokens": ("Tokens that the radix tree holds.", lambda g: g.logical_tokens),
    "held_slots": ("Token slots that hold them.", lambda g: g.pool.full + g.pool.compressed),
    "tokens_per_slot": (
        "Logical tokens held divided by token slots held (1 without compression).",
        lambda g: g.logical_tokens / max(g.pool.full + g.pool.compressed, 1) if g.logical_tokens else 1.0,
    ),
    "span_tokens": ("Tokens held compressed.", lambda g: g.span_tokens),
    "span_slots": ("Token slots that hold them.", lambda g: g.pool.compressed),
    "spans": ("Compressed nodes in the tree.", lambda g: g.spans),
    "segments": ("Segments that store them.", lambda g: g.segments),
    "dead_entries": ("Entries stored that no span reads any more.", lambda g: g.dead_entries),
    "pending_ranges": ("Ranges that wait for their readers before they are compressed.", lambda g: g.pending_ranges),
    "scoring_jobs": ("Prefixes that wait for scoring passes, or for their fit.", lambda g: g.scoring_jobs),
    "observation_bytes": ("Memory, outside the pool, of what readers attended to.", lambda g: g.observation_bytes),
    "shared_spans": ("Spans that two or more running requests read.", lambda g: g.shared_spans),
    "readers_per_span": ("Running requests per span, on average.", lambda g: g.readers / max(g.spans, 1)),
    "max_readers_per_span": ("Running requests on the span that most read.", lambda g: g.max_readers),
}
POOL_PARTS: Mapping[str, Callable[[Gauges], int]] = {
    "compressed": lambda g: g.pool.compressed,
    "full": lambda g: g.pool.full,
    "private": lambda g: g.pool.private,
    "free": lambda g: g.pool.free,
}
COUNTERS: Mapping[str, tuple[str, Callable[[Totals], float]]] = {
    "compressions": ("Segments written.", lambda t: t.compressions),
    "compressed_tokens": ("Tokens that went into them.", lambda t: t.compressed_tokens),
    "released_slots": ("Token slots that compressions gave back.", lambda t: t.released_slots),
    "kept_entries": ("Entries stored.", lambda t: t.kept_entries),
    "evicted_entries": ("Entries evicted.", lambda t: t.evicted_entries),
    "merged_entries": ("Entries merged into stored ones.", lambda t: t.merged_entries),
    "scoring_passes": ("Extra forwards run to score prefixes.", lambda t: t.scoring_passes),
    "splits": ("Spans cut in two.", lambda t: t.splits),
    "repacks": ("Segments shrunk after a part was dropped.", lambda t: t.repacks),
    "squeezes": ("Segments squeezed because token slots were short.", lambda t: t.squeezes),
    "squeezed_slots": ("Token slots given back by squeezing.", lambda t: t.squeezed_slots),
    "dropped_nodes": ("Nodes dropped from the tree.", lambda t: t.dropped_nodes),
    "dropped_spans": ("Compressed nodes among them.", lambda t: t.dropped_spans),
    "stored_segments": ("Segments written to the store.", lambda t: t.stored_segments),
    "stored_bytes": ("Bytes of them.", lambda t: t.stored_bytes),
    "not_stored": ("Segments that could not be written, or came too fast.", lambda t: t.not_stored),
    "loaded_segments": ("Segments that came from the store into the tree.", lambda t: t.loaded_segments),
    "loaded_tokens": ("Tokens that they stand for.", lambda t: t.loaded_tokens),
    "late_loads": ("Requests that went on because the store took too long.", lambda t: t.late_loads),
    "failed_loads": ("Errors of the store, and segments that were corrupt.", lambda t: t.failed_loads),
}
REFUSALS: Mapping[str, Callable[[Totals], int]] = {
    "in-use": lambda t: t.refused_in_use,
    "not-cached": lambda t: t.refused_not_cached,
    "no-room": lambda t: t.refused_no_room,
    "no-memory": lambda t: t.refused_no_memory,
}
COMPRESSION_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


class MetricsListener(CacheListener):
    """Writes metrics; create it where ``PROMETHEUS_MULTIPROC_DIR`` is set already, once per process.

    Counters and gauges are written at most once a second, so a burst of changes costs nothing more.

    Args:
        tree: the cache.
        totals: counters to export; somebody else keeps them.
        labels: labels of all series.
        lost_events: reads how many events were lost.
        errors: exceptions that were held, by place; somebody else counts them.
    """

    def __init__(
        self,
        tree: KVEvictTree,
        totals: Totals,
        labels: Mapping[str, str],
        lost_events: Callable[[], int],
        errors: Mapping[Place, int],
    ) -> None:
        self._tree = tree
        self._totals = totals
        self._lost_events = lost_events
        self._next_refresh = 0.0
        names = list(labels)

        def gauge(name: str, text: str, *extra: str) -> Gauge:
            return Gauge(PREFIX + name, text, [*names, *extra], multiprocess_mode="mostrecent")

        def counter(name: str, text: str, *extra: str) -> Counter:
            return Counter(PREFIX + name, text, [*names, *extra])

        pool = gauge("pool_slots", "Token slots of the pool by who holds them.", "holder")
        self._gauges = [(gauge(name, text).labels(**labels), read) for name, (text, read) in GAUGES.items()]
        self._gauges += [(pool.labels(**labels, holder=part), read) for part, read in POOL_PARTS.items()]
        refused = (
            "Ranges not compressed (in-use), scored (no-room), observed (no-memory); prompts not cached (not-cached)."
        )
        refusals = counter("refusals", refused, "reason")
        self._counters = [(counter(name, text).labels(**labels), read) for name, (text, read) in COUNTERS.items()]
        self._counters += [(refusals.labels(**labels, reason=reason), read) for reason, read in REFUSALS.items()]
        lost = counter("lost_events", "Events that the event stream lost because they came too fast.")
        self._counters.append((lost.labels(**labels), lambda _totals: self._lost_events()))
        held = counter("errors", "Exceptions that were held: each failed one request, job or onlooker.", "place")
        for place in Place:
            self._counters.append((held.labels(**labels, place=place.value), partial(_count_of, errors, place)))
        self._written = [0.0] * len(self._counters)
        self._seconds = Histogram(
            PREFIX + "compression_seconds",
            "Host time of one compression (on a GPU: launching only).",
            names,
            buckets=COMPRESSION_BUCKETS,
        ).labels(**labels)

    def compressed(self, nodes: Sequence[Node], compression: Compression) -> None:
        self._seconds.observe(compression.seconds)

    def between_steps(self) -> None:
        now = time.monotonic()
        if now >= self._next_refresh:
            self._next_refresh = now + REFRESH_S
            self.refresh()

    def refresh(self) -> None:
        """Write all gauges, and what counters grew by."""
        gauges = read_gauges(self._tree)
        for child, read in self._gauges:
            child.set(read(gauges))
        for i, (counter, read_total) in enumerate(self._counters):
            total = read_total(self._totals)
            if total > self._written[i]:
                counter.inc(total - self._written[i])
                self._written[i] = total


def _count_of(errors: Mapping[Place, int], place: Place, _totals: Totals) -> float:
    return errors[place]
