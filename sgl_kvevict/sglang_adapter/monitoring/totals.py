# ruff: noqa: D102 - the base class describes the methods
"""Counters since the server started: what metrics export and ``sgl-kvevict top`` shows."""

from __future__ import annotations

from collections.abc import Sequence

from sgl_kvevict.compression import Compression
from sgl_kvevict.events.questions import Totals
from sgl_kvevict.lifecycle.listener import (
    LOAD_LATE,
    REFUSED_IN_USE,
    REFUSED_NO_MEMORY,
    REFUSED_NO_ROOM,
    CacheListener,
)
from sgl_kvevict.lifecycle.nodes import Node
from sgl_kvevict.prefix import Segment, Span
from sgl_kvevict.store import Written


class TotalsListener(CacheListener):
    """Keeps totals since the server started.

    Args:
        num_runs: entries of one uncompressed token.
    """

    def __init__(self, num_runs: int) -> None:
        self.totals = Totals()
        self._num_runs = num_runs

    def compressed(self, nodes: Sequence[Node], compression: Compression) -> None:
        totals = self.totals
        totals.compressions += 1
        totals.compressed_tokens += compression.new_tokens
        totals.compression_seconds += compression.seconds
        totals.released_slots += compression.freed.numel()
        totals.kept_entries += compression.new_entries
        totals.evicted_entries += evicted_entries(compression, self._num_runs)
        totals.merged_entries += compression.merged_entries

    def split(self, upper: Node, lower: Node, position: int) -> None:
        self.totals.splits += 1

    def dropped(self, node: Node, span: Span | None, slots: int) -> None:
        self.totals.dropped_nodes += 1
        self.totals.dropped_spans += span is not None
        self.totals.dropped_slots += slots

    def repacked(self, owner: Node, segment: Segment, released: int) -> None:
        self.totals.repacks += released > 0

    def squeezed(self, owner: Node, segment: Segment, released: int) -> None:
        self.totals.squeezes += 1
        self.totals.squeezed_slots += released

    def scored(self, start: int, end: int, seconds: float) -> None:
        self.totals.scoring_passes += 1

    def refused(self, reason: str, num_tokens: int) -> None:
        if reason == REFUSED_IN_USE:
            self.totals.refused_in_use += 1
        elif reason == REFUSED_NO_ROOM:
            self.totals.refused_no_room += 1
        elif reason == REFUSED_NO_MEMORY:
            self.totals.refused_no_memory += 1
        else:
            self.totals.refused_not_cached += 1

    def stored(self, written: Written) -> None:
        self.totals.stored_segments += written.num_bytes > 0
        self.totals.stored_bytes += written.num_bytes
        self.totals.not_stored += written.error is not None

    def loaded(self, key: str, start: int, end: int) -> None:
        self.totals.loaded_segments += 1
        self.totals.loaded_tokens += end - start

    def load_failed(self, reason: str, error: str) -> None:
        if reason == LOAD_LATE:
            self.totals.late_loads += 1
        else:
            self.totals.failed_loads += 1

    def cleared(self) -> None:
        self.totals.clears += 1


def evicted_entries(compression: Compression, num_runs: int) -> int:
    """Entries of the range that are neither stored nor merged into stored ones."""
    return compression.new_tokens * num_runs - compression.new_entries - compression.merged_entries
