"""What the host's memory holds of segments that the pool has: the entries that were evicted from them."""

from __future__ import annotations

from collections.abc import Sequence

from sgl_kvevict.copies import CopiedRows, EvictedPart
from sgl_kvevict.guard import Guard, Place
from sgl_kvevict.segments.ranker import Compressor
from sgl_kvevict.segments.segment import Segment, View
from sgl_kvevict.segments.sources import Source
from sgl_kvevict.store.host import HostSegments
from sgl_kvevict.store.segment_file import SegmentRecord


class Complements:
    """Keeps the entries that resizes evict, and hands them back when their segment grows.

    A segment has each entry once: in the pool, in one of its parts (:attr:`Segment.evicted`), or nowhere, once it is
    lost. A resize adds one part, of rows with the fewest bits that the configuration allows; growth takes back whole
    parts, the last one first. Nothing is kept without memory of the host, or with a budget of 1.0.

    A copy of a segment in the host's memory has a list of the same parts. They are never moved, and nobody counts who
    has them: they go when their room is needed, the oldest first.
    """

    def __init__(self, compressor: Compressor, guard: Guard, host: HostSegments) -> None:
        self._is_on = host.num_blocks > 0 and compressor.config.budget < 1
        self._packer = compressor.packer
        self._guard = guard
        self.host = host
        self._bits = 16 if compressor.config.bits == 16 else 4

    def evicted(self, source: Source) -> CopiedRows | None:
        """Copy what a resize is about to evict, on the pool's device; None: nothing is kept."""
        # After a repack ranks hold different numbers of entries in equally many slots, so maybe one evicts none. It
        # makes a part all the same: ranks have parts of the same tokens.
        if not self._is_on or not self.host.largest(int(source.kept.num_entries < source.count)):
            return None
        copied: CopiedRows | None = None
        with self._guard.at(Place.HOST):
            copied = self._packer.copied(source.evicted(self._bits), self._bits)
        return copied

    def put(self, copied: CopiedRows | None, start: int, end: int) -> list[EvictedPart]:
        """Move copied entries of the tokens ``[start, end)`` to the host's memory.

        Returns the part; [] if there is none, there is no room, or an error was held.
        """
        parts: list[EvictedPart] = []
        if copied is not None:
            with self._guard.at(Place.HOST):
                parts = self.host.put_evicted(copied, start, end)
        return parts

    def put_stored(self, record: SegmentRecord) -> list[EvictedPart]:
        """Move what a file has of evicted entries to the host's memory; return as :meth:`put`.

        Only a forged file has rows of other bits than this server's, or than its segment's.
        """
        rows = record.evicted
        is_ours = self._is_on and rows is not None and rows.bits == self._bits == record.kept.rows.bits
        return self.put(rows, record.start, record.end) if is_ours else []

    def num_bytes(self, segment: Segment) -> int:
        """Bytes of the host's memory that the parts of a segment take."""
        return sum(len(part.blocks) for part in segment.evicted) * self.host.block_bytes

    def copied(self, views: Sequence[View]) -> CopiedRows | None:
        """Copy what was evicted from views of segments, as one part, to the pool's device; None: all of it is lost."""
        there = [self.host.get_evicted(part) for part in parts_of(views) if part.blocks]
        return CopiedRows.joined(there) if there else None


def parts_of(views: Sequence[View]) -> list[EvictedPart]:
    """Parts of what was evicted from views of segments, lost or not."""
    parts = (part.within(view.start, view.end) for view in views for part in view.segment.evicted)
    return [part for part in parts if part.start < part.end]
