"""Prometheus metrics on SGLang's ``/metrics`` endpoint, with the labels of its radix-cache metrics.

Names and texts are fields and descriptions of :class:`~sgl_kvevict.events.totals.Totals` (counters) and ``Gauges``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING

from prometheus_client import Counter, Gauge

from sgl_kvevict.events.totals import ENTRIES, REFUSED, Gauges, Totals, descriptions
from sgl_kvevict.guard import Place
from sgl_kvevict.sglang_adapter.monitoring.server_info import read_gauges

if TYPE_CHECKING:
    from sgl_kvevict.sglang_adapter.tree import KVEvictTree

PREFIX = "kvevict:"
REFRESH_S, REFRESH_SHARE, MAX_PAUSE_S = 1.0, 0.01, 60.0
"""Seconds between two refreshes; the part of the scheduler's time that they may take; the longest pause for that."""
HOLDERS = ("compressed", "full", "private", "free")


class Metrics:
    """Writes metrics once a second at most; create it once per process, after ``PROMETHEUS_MULTIPROC_DIR`` is set."""

    def __init__(self, tree: KVEvictTree, labels: Mapping[str, str]) -> None:
        self._tree = tree
        self._next_refresh = 0.0
        self._gauges: list[tuple[Gauge, Callable[[Gauges], float]]] = []
        self._counters: list[tuple[Counter, Callable[[], float]]] = []
        # Counters of Prometheus only grow by amounts, and totals are numbers: the difference since the last refresh is
        # added.
        self._written: dict[Counter, float] = {}

        names, texts = list(labels), descriptions(Gauges)
        # With several processes each writes a file; the newest value is the only one that says something about now.
        pool = Gauge(PREFIX + "pool_slots", texts.pop("pool"), [*names, "holder"], multiprocess_mode="mostrecent")
        for holder in HOLDERS:
            self._gauges.append((pool.labels(**labels, holder=holder), attrgetter(f"pool.{holder}")))
        entries = Gauge(
            PREFIX + "entries", "Entries of compressed tokens.", [*names, "bits"], multiprocess_mode="mostrecent"
        )
        for name, text in texts.items():
            if name.startswith(ENTRIES):
                bits = name.removeprefix(ENTRIES)
                self._gauges.append((entries.labels(**labels, bits=bits), attrgetter(name)))
                continue
            gauge = Gauge(PREFIX + name, text, names, multiprocess_mode="mostrecent")
            self._gauges.append((gauge.labels(**labels), attrgetter(name)))

        refusals = Counter(PREFIX + "refusals", "Ranges, prefixes or prompts refused.", [*names, "reason"])
        for name, text in descriptions(Totals).items():
            if name.startswith(REFUSED):
                reason = name.removeprefix(REFUSED).replace("_", "-")
                counter = refusals.labels(**labels, reason=reason)
            else:
                counter = Counter(PREFIX + name, text, names).labels(**labels)
            self._counters.append((counter, partial(getattr, tree.prefixes.totals, name)))
        errors = Counter(PREFIX + "errors", "Exceptions held; each failed one request.", [*names, "place"])
        for place in Place:
            counter = errors.labels(**labels, place=place.value)
            self._counters.append((counter, partial(tree.guard.errors.__getitem__, place)))

    def each_turn(self) -> None:
        """Refresh, at most once per ``REFRESH_S``, and less often if that takes long."""
        now = time.monotonic()
        if now >= self._next_refresh:
            self._next_refresh = now + REFRESH_S  # before: one that fails is not repeated in every turn
            self.refresh()
            end = time.monotonic()
            self._next_refresh = max(self._next_refresh, end + min((end - now) / REFRESH_SHARE, MAX_PAUSE_S))

    def refresh(self) -> None:
        """Write all gauges, and the growth of all counters."""
        gauges = read_gauges(self._tree)
        for gauge, value in self._gauges:
            gauge.set(value(gauges))
        for counter, total in self._counters:
            growth = total() - self._written.get(counter, 0)
            if growth > 0:
                counter.inc(growth)
                self._written[counter] = total()
