"""What the host's memory holds of segments that the pool has: the entries that were evicted from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sgl_kvevict.copies import CopiedRows
from sgl_kvevict.guard import Guard, Place
from sgl_kvevict.segments import Compressor, CopiedEntries, Segment, Sources, View
from sgl_kvevict.store.host import EvictedPart, HostSegments

ORDER = "order"


@dataclass(eq=False)
class Complement:
    """What was evicted from a segment.

    Attributes:
        parts: in the order of their evictions, so the first one is worth least; lost ones are among them.
        num_returned: parts that it has taken back since its rows were written.
    """

    parts: list[EvictedPart] = field(default_factory=list)
    num_returned: int = 0


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
        self._of: dict[Segment, Complement] = {}

    def __getitem__(self, segment: Segment) -> Complement:
        """The complement of a segment, maybe an empty one."""
        return self._of.get(segment) or Complement()

    def there(self, segment: Segment) -> list[EvictedPart]:
        """Parts that are not lost, as they were evicted: what can come back when a segment grows."""
        return [part for part in self[segment].parts if not part.is_lost]

    def last(self, segment: Segment) -> EvictedPart | None:
        """What comes back first; None: nothing can."""
        return next(reversed(self.there(segment)), None)

    # ---- out --------------------------------------------------------------------------------------------------

    def evicted(self, sources: Sources) -> CopiedEntries | None:
        """Copy what a resize is about to evict, on the pool's device; None: nothing is kept."""
        # After a repack ranks hold different numbers of entries in equally many slots, so maybe one evicts none. It
        # makes a part all the same: ranks have parts of the same tokens.
        if not self._is_on or not self._host.largest(int(sources.num_entries < sum(sources.counts))):
            return None
        copied: CopiedEntries | None = None
        with self._guard.at(Place.HOST):
            copied = self._packer.copy(sources.evicted(self._bits))
        return copied

    def put(self, copied: CopiedEntries | None, start: int, end: int) -> list[EvictedPart]:
        """Move copied entries of the tokens ``[start, end)`` to the host's memory; the caller holds the part.

        Returns the part; [] if there is no room, or an error was held. Entries from a file are on the CPU. They, too,
        go by way of the pool's device, whose stream lets them wait for copies under way that still read the blocks.
        """
        if copied is None:
            return []
        parts: list[EvictedPart] = []
        with self._guard.at(Place.HOST):
            (rows,) = copied.parts
            assert copied.order is not None  # by which they were evicted
            tensors = {
                name: part.to(self._packer.k_arena.device)
                for name, part in (vars(rows) | {ORDER: copied.order}).items()
                if isinstance(part, Tensor)
            }
            part = self._host.put_evicted(tensors, (start, end))
            if part is not None:
                parts.append(part)
        return parts

    def shrunk(self, segment: Segment, parts: Sequence[EvictedPart]) -> None:
        """A segment is written anew; ``parts`` are what it has lost by that, already held."""
        complement = self._of.setdefault(segment, Complement())
        complement.parts += parts
        complement.num_returned = 0
        if not complement.parts:
            del self._of[segment]

    def join(self, segment: Segment, joined: Sequence[Segment]) -> None:
        """Several segments become one."""
        parts = [part for each in joined for part in self._of.pop(each, Complement()).parts]
        if parts:
            self._of[segment] = Complement(parts)

    def of(self, views: Sequence[View]) -> list[EvictedPart]:
        """Parts of what was evicted from views of segments, lost or not; not held for the caller."""
        return [part.within(view.start, view.end) for view in views for part in self[view.segment].parts]

    def num_bytes(self, segment: Segment) -> int:
        """Bytes of the host's memory that the parts of a segment take."""
        return sum(len(part.copy.blocks) for part in self[segment].parts) * self._host.block_bytes

    # ---- in ---------------------------------------------------------------------------------------------------

    def copied(self, views: Sequence[View]) -> CopiedEntries | None:
        """Copy what was evicted from views of segments, as one part, to the pool's device; None: all of it is lost."""
        return self.joined([part for part in self.of(views) if not part.is_lost])

    def joined(self, parts: Sequence[EvictedPart]) -> CopiedEntries | None:
        """Copy parts that are not lost, as one part, to the pool's device; None: there are none."""
        there = [self.get(part) for part in parts]
        if len(there) < 2:
            return there[0] if there else None
        rows, numbers = CopiedRows.joined([each.parts[0] for each in there])
        order = torch.cat([each.order for each in there if each.order is not None])
        return CopiedEntries((rows,), order[numbers])

    def get(self, part: EvictedPart) -> CopiedEntries:
        """Copy a part to the pool's device. One of which tokens were cut off needs a host sync."""
        tensors = self._host.get_evicted(part)
        order = tensors.pop(ORDER)
        rows = CopiedRows(self._bits, **tensors)
        if not part.is_whole:
            rows, kept = rows.within(part.start, part.end)
            order = order[kept]
        return CopiedEntries((rows,), order)

    def take(self, segment: Segment, parts: Sequence[EvictedPart]) -> None:
        """Forget parts that are in the pool again, or that cannot be read."""
        complement = self[segment]
        complement.parts = [part for part in complement.parts if part not in parts]
        complement.num_returned += 1
        self._host.release(parts)
        if not complement.parts:
            self.forget(segment)

    def attach(self, segment: Segment, parts: Sequence[EvictedPart]) -> None:
        """A segment came back from the host's memory; ``parts`` are what had been evicted before."""
        held = self._host.hold([part.within(segment.start, segment.end) for part in parts])
        if held:
            self._of[segment] = Complement(held)

    def restore(self, segment: Segment, rows: CopiedRows, order: Tensor) -> None:
        """A segment came back from a file with entries that had been evicted; they are kept if there is room.

        ``order``: their keys, [num_entries], int16. Only a forged file has rows of other bits than this server's.
        """
        if self._is_on and rows.bits == self._bits:
            parts = self.put(CopiedEntries((rows,), order), segment.start, segment.end)
            if parts:
                self._of[segment] = Complement(parts)

    # ---- changes of the tree ----------------------------------------------------------------------------------

    def end_at(self, segment: Segment, end: int) -> None:
        """The last span of a segment was dropped, so that the segment ends at ``end``: forget entries behind it."""
        if segment not in self._of:
            return
        complement = self._of[segment]
        kept = self._host.hold([part.within(segment.start, end) for part in complement.parts])
        self._host.release(complement.parts)
        complement.parts = kept
        if not kept:
            self.forget(segment)

    def forget(self, segment: Segment) -> None:
        """A segment has left the pool."""
        self._host.release(self[segment].parts)
        self._of.pop(segment, None)

    def clear(self) -> None:
        """Forget everything; the host's memory is empty."""
        self._of.clear()
