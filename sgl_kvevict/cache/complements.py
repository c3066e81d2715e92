"""What the host's memory holds of segments that the pool has: the entries that were evicted from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sgl_kvevict.copies import CopiedRows
from sgl_kvevict.guard import Guard, Place
from sgl_kvevict.segments import Compressor, CopiedEntries, Segment, Sources, View
from sgl_kvevict.store.host import HostSegments, Piece

ORDER = "order"


@dataclass(eq=False)
class Complement:
    """What was evicted from a segment.

    Attributes:
        pieces: in the order of their evictions, so the first one is worth least; lost ones are among them.
        num_returned: parts that it has taken back since its rows were written.
    """

    pieces: list[Piece] = field(default_factory=list)
    num_returned: int = 0


class Complements:
    """Keeps the entries that resizes evict, and hands them back when their segment grows.

    A segment has each entry once: in the pool, in one of its pieces, or nowhere, once it is lost. A resize adds one
    piece, of rows with the fewest bits that the configuration allows; growth takes back whole pieces, the last one
    first. Nothing is kept without memory of the host, or where prefixes do not shrink when slots are short.
    """

    def __init__(self, compressor: Compressor, guard: Guard, host: HostSegments) -> None:
        self._is_on = host.num_blocks > 0 and len(compressor.config.shares) > 1
        self._packer = compressor.packer
        self._guard = guard
        self._host = host
        self._bits = {16: 16, 8: 8, 4: 4, "auto": 4}[compressor.config.bits]
        self._of: dict[Segment, Complement] = {}

    def __getitem__(self, segment: Segment) -> Complement:
        """The complement of a segment, maybe an empty one."""
        return self._of.get(segment) or Complement()

    def there(self, segment: Segment) -> list[Piece]:
        """Pieces that are not lost, as they were evicted: what can come back when a segment grows."""
        return [piece for piece in self[segment].pieces if not piece.is_lost]

    def last(self, segment: Segment) -> Piece | None:
        """What comes back first; None: nothing can."""
        return next(reversed(self.there(segment)), None)

    # ---- out --------------------------------------------------------------------------------------------------

    def evicted(self, sources: Sources) -> CopiedEntries | None:
        """Copy what a resize is about to evict, on the pool's device; None: nothing is kept."""
        # After a repack ranks hold different numbers of entries in equally many slots, so maybe one evicts none. It
        # makes a piece all the same: ranks have pieces of the same tokens.
        if not self._is_on or not self._host.largest(int(sources.num_entries < sum(sources.counts))):
            return None
        copied: CopiedEntries | None = None
        with self._guard.at(Place.HOST):
            copied = self._packer.copy(sources.evicted(self._bits))
        return copied

    def put(self, copied: CopiedEntries | None, start: int, end: int) -> list[Piece]:
        """Move copied entries of the tokens ``[start, end)`` to the host's memory; the caller holds the piece.

        Returns the piece; [] if there is no room, or an error was held. Entries from a file are on the CPU. They, too,
        go by way of the pool's device, whose stream lets them wait for copies under way that still read the blocks.
        """
        if copied is None:
            return []
        pieces: list[Piece] = []
        with self._guard.at(Place.HOST):
            (rows,) = copied.parts
            assert copied.order is not None  # by which they were evicted
            tensors = {
                name: part.to(self._packer.k_arena.device)
                for name, part in (vars(rows) | {ORDER: copied.order}).items()
                if isinstance(part, Tensor)
            }
            piece = self._host.put_evicted(tensors, (start, end))
            if piece is not None:
                pieces.append(piece)
        return pieces

    def shrunk(self, segment: Segment, pieces: Sequence[Piece]) -> None:
        """A segment is written anew; ``pieces`` are what it has lost by that, already held."""
        complement = self._of.setdefault(segment, Complement())
        complement.pieces += pieces
        complement.num_returned = 0
        if not complement.pieces:
            del self._of[segment]

    def of(self, views: Sequence[View]) -> list[Piece]:
        """Pieces of what was evicted from views of segments, lost or not; not held for the caller."""
        return [piece.within(view.start, view.end) for view in views for piece in self[view.segment].pieces]

    def num_bytes(self, segment: Segment) -> int:
        """Bytes of the host's memory that the pieces of a segment take."""
        return sum(len(piece.copy.blocks) for piece in self[segment].pieces) * self._host.block_bytes

    # ---- in ---------------------------------------------------------------------------------------------------

    def copied(self, views: Sequence[View]) -> CopiedEntries | None:
        """Copy what was evicted from views of segments, as one piece, to the pool's device; None: all of it is lost."""
        return self.joined([piece for piece in self.of(views) if not piece.is_lost])

    def joined(self, pieces: Sequence[Piece]) -> CopiedEntries | None:
        """Copy pieces that are not lost, as one piece, to the pool's device; None: there are none."""
        there = [self.get(piece) for piece in pieces]
        if len(there) < 2:
            return there[0] if there else None
        rows, numbers = CopiedRows.joined([each.parts[0] for each in there])
        order = torch.cat([each.order for each in there if each.order is not None])
        return CopiedEntries((rows,), order[numbers])

    def get(self, piece: Piece) -> CopiedEntries:
        """Copy a piece to the pool's device. One of which tokens were cut off needs a host sync."""
        tensors = self._host.get_evicted(piece)
        order = tensors.pop(ORDER)
        rows = CopiedRows(self._bits, **tensors)
        if not piece.is_whole:
            rows, kept = rows.within(piece.start, piece.end)
            order = order[kept]
        return CopiedEntries((rows,), order)

    def take(self, segment: Segment, pieces: Sequence[Piece]) -> None:
        """Forget pieces that are in the pool again, as one part, or that cannot be read."""
        complement = self[segment]
        complement.pieces = [piece for piece in complement.pieces if piece not in pieces]
        complement.num_returned += 1
        self._host.release(pieces)
        if not complement.pieces:
            self.forget(segment)

    def attach(self, segment: Segment, pieces: Sequence[Piece]) -> None:
        """A segment came back from the host's memory; ``pieces`` are what had been evicted before."""
        held = self._host.hold([piece.within(segment.start, segment.end) for piece in pieces])
        if held:
            self._of[segment] = Complement(held)

    def restore(self, segment: Segment, rows: CopiedRows, order: Tensor) -> None:
        """A segment came back from a file with entries that had been evicted; they are kept if there is room.

        ``order``: their keys, [num_entries], int16. Only a forged file has rows of other bits than this server's.
        """
        if self._is_on and rows.bits == self._bits:
            pieces = self.put(CopiedEntries((rows,), order), segment.start, segment.end)
            if pieces:
                self._of[segment] = Complement(pieces)

    # ---- changes of the tree ----------------------------------------------------------------------------------

    def end_at(self, segment: Segment, end: int) -> None:
        """The last span of a segment was dropped, so that the segment ends at ``end``: forget entries behind it."""
        if segment not in self._of:
            return
        complement = self._of[segment]
        kept = self._host.hold([piece.within(segment.start, end) for piece in complement.pieces])
        self._host.release(complement.pieces)
        complement.pieces = kept
        if not kept:
            self.forget(segment)

    def forget(self, segment: Segment) -> None:
        """A segment has left the pool."""
        self._host.release(self[segment].pieces)
        self._of.pop(segment, None)

    def clear(self) -> None:
        """Forget everything; the host's memory is empty."""
        self._of.clear()
