"""What the host's memory holds of segments that the pool has: the entries that were evicted from them."""

from __future__ import annotations

from collections.abc import Sequence

from sgl_kvevict.copies import CopiedRows
from sgl_kvevict.guard import Guard, Place
from sgl_kvevict.segments import Compressor, Segment, Source, View
from sgl_kvevict.store.host import EvictedPart, HostSegments


class Complements:
    """Keeps the entries that resizes evict, and hands them back when their segment grows.

    A segment has each entry once: in the pool, in one of its parts, or nowhere, once it is lost. A resize adds one
    part, of rows with the fewest bits that the configuration allows; growth takes back whole parts, the last one
    first. Nothing is kept without memory of the host, or with a budget of 1.0.
    """

    def __init__(self, compressor: Compressor, guard: Guard, host: HostSegments) -> None:
        self._is_on = host.num_blocks > 0 and compressor.config.budget < 1
        self._packer = compressor.packer
        self._guard = guard
        self._host = host
        self._bits = 16 if compressor.config.bits == 16 else 4
        self._of: dict[Segment, list[EvictedPart]] = {}

    def __getitem__(self, segment: Segment) -> list[EvictedPart]:
        """What was evicted from a segment, the first part first, which is worth least; lost ones are among them."""
        return self._of.get(segment, [])

    def there(self, segment: Segment) -> list[EvictedPart]:
        """Parts that are not lost, as they were evicted: what can come back when a segment grows."""
        return [part for part in self[segment] if not part.is_lost]

    def last(self, segment: Segment) -> EvictedPart | None:
        """What comes back first; None: nothing can."""
        return next(reversed(self.there(segment)), None)

    # ---- out --------------------------------------------------------------------------------------------------

    def evicted(self, source: Source) -> CopiedRows | None:
        """Copy what a resize is about to evict, on the pool's device; None: nothing is kept."""
        # After a repack ranks hold different numbers of entries in equally many slots, so maybe one evicts none. It
        # makes a part all the same: ranks have parts of the same tokens.
        if not self._is_on or not self._host.largest(int(source.num_entries < source.count)):
            return None
        copied: CopiedRows | None = None
        with self._guard.at(Place.HOST):
            copied = self._packer.copy_entries(source.evicted(self._bits))
        return copied

    def put(self, copied: CopiedRows | None, start: int, end: int) -> list[EvictedPart]:
        """Move copied entries of the tokens ``[start, end)`` to the host's memory; the caller holds the part.

        Returns the part; [] if there is no room, or an error was held. Entries from a file are on the CPU. They, too,
        go by way of the pool's device, whose stream lets them wait for copies under way that still read the blocks.
        """
        if copied is None:
            return []
        parts: list[EvictedPart] = []
        with self._guard.at(Place.HOST):
            tensors = {name: part.to(self._packer.k_arena.device) for name, part in vars(copied).items()}
            part = self._host.put_evicted(tensors, (start, end))
            if part is not None:
                parts.append(part)
        return parts

    def shrunk(self, segment: Segment, parts: Sequence[EvictedPart]) -> None:
        """A segment is written anew; ``parts`` are what it has lost by that, already held."""
        if parts:
            self._of.setdefault(segment, []).extend(parts)

    def join(self, segment: Segment, joined: Sequence[Segment]) -> None:
        """Several segments become one."""
        self._set(segment, [part for each in joined for part in self._of.pop(each, [])])

    def of(self, views: Sequence[View]) -> list[EvictedPart]:
        """Parts of what was evicted from views of segments, lost or not; not held for the caller."""
        return [part.within(view.start, view.end) for view in views for part in self[view.segment]]

    def num_bytes(self, segment: Segment) -> int:
        """Bytes of the host's memory that the parts of a segment take."""
        return sum(len(part.copy.blocks) for part in self[segment]) * self._host.block_bytes

    # ---- in ---------------------------------------------------------------------------------------------------

    def copied(self, views: Sequence[View]) -> CopiedRows | None:
        """Copy what was evicted from views of segments, as one part, to the pool's device; None: all of it is lost."""
        there = [self.get(part) for part in self.of(views) if not part.is_lost]
        return CopiedRows.joined(there) if there else None

    def get(self, part: EvictedPart) -> CopiedRows:
        """Copy a part to the pool's device. One of which tokens were cut off needs a host sync."""
        rows = CopiedRows(**self._host.get_evicted(part))
        return rows if part.is_whole else rows.within(part.start, part.end)

    def take(self, segment: Segment, part: EvictedPart) -> None:
        """Forget a part that is in the pool again, or that cannot be read."""
        self._host.release([part])
        self._set(segment, [each for each in self[segment] if each is not part])

    def attach(self, segment: Segment, parts: Sequence[EvictedPart]) -> None:
        """A segment came back from the host's memory; ``parts`` are what had been evicted before."""
        self._set(segment, self._host.hold([part.within(segment.start, segment.end) for part in parts]))

    def restore(self, segment: Segment, rows: CopiedRows) -> None:
        """A segment came back from a file with entries that had been evicted; they are kept if there is room.

        Only a forged file has rows of other bits than this server's, or than its segment's.
        """
        if self._is_on and rows.bits == self._bits == segment.packed.rows.bits:
            self._set(segment, self.put(rows, segment.start, segment.end))

    # ---- changes of the tree ----------------------------------------------------------------------------------

    def end_at(self, segment: Segment, end: int) -> None:
        """The last span of a segment was dropped, so that the segment ends at ``end``: forget entries behind it."""
        # Held before the old ones are released: the last holder would take the copy with it.
        kept = self._host.hold([part.within(segment.start, end) for part in self[segment]])
        self.forget(segment)
        self._set(segment, kept)

    def forget(self, segment: Segment) -> None:
        """A segment has left the pool."""
        self._host.release(self._of.pop(segment, []))

    def _set(self, segment: Segment, parts: list[EvictedPart]) -> None:
        self._of.pop(segment, None)
        if parts:
            self._of[segment] = parts

    def clear(self) -> None:
        """Forget everything; the host's memory is empty."""
        self._of.clear()
