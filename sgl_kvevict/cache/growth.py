"""Lets segments grow again: entries that were evicted come back from the host's memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from sgl_kvevict.cache.core import Core
from sgl_kvevict.cache.nodes import Node
from sgl_kvevict.cache.resize import Resizer
from sgl_kvevict.copies import EvictedPart
from sgl_kvevict.guard import Place
from sgl_kvevict.segments.segment import Segment


class Growth:
    """Decides when segments grow, and by how much.

    A segment grows when a request asks, part by part: by what one resize has evicted, the last one first, so that it
    goes through the sizes that it had. A part that cannot be read is forgotten; one for which there are no slots stays
    in the host's memory.

    Tensor-parallel ranks decide alike, from numbers that are equal on all of them; how many slots a part takes is the
    largest number of all ranks.
    """

    def __init__(self, core: Core, resizer: Resizer) -> None:
        self._tree, self._table, self._guard = core.tree, core.table, core.guard
        self._packer, self._resizer, self._host = core.compressor.packer, resizer, core.complements.host

    def to_share(self, path: Sequence[Node], share: float) -> None:
        """Let the segments of a path grow until they have a share of their entries, for a request that asks for it.

        Other prefixes shrink or are dropped for it, as for a prompt that is computed. No node of the path itself is
        dropped: the request would have to compute its tokens, in more slots than they had.
        """
        spans = (self._table.spans.get(node) for node in path)  # a range may become one while those before it grow
        self._table.growing = path
        try:
            with self._tree.holding(path):
                for segment, _ in groupby(span.segment for span in spans if span is not None):
                    while self.next_of(segment) is not None and self._lacks(segment, share) and self.grow(segment):
                        pass
        finally:
            self._table.growing = ()

    def _lacks(self, segment: Segment, share: float) -> bool:
        """Whether a segment has less than a share of its entries, on some rank."""
        wanted = share * (segment.live_end - segment.start) * segment.geometry.num_runs
        return bool(self._tree.largest(int(segment.num_live_entries < wanted)))

    def next_of(self, segment: Segment) -> EvictedPart | None:
        """The part that a segment takes back next; None: it cannot grow."""
        if segment not in self._table.packed or segment.keys is None:
            return None
        return next((part for part in reversed(segment.evicted) if part.blocks), None)

    def grow(self, segment: Segment) -> bool:
        """Give a segment back what was evicted from it last; if it cannot grow, nothing happens.

        Other prefixes may shrink or be dropped for it. Returns whether it came back, or was of tokens that had been cut
        off: then the part before it is next.
        """
        part = self.next_of(segment)
        if part is None:
            return False
        entries, end = None, segment.live_end
        with self._guard.at(Place.HOST):
            entries = self._host.get_evicted(part.within(segment.start, end))
        # An error was held, or the parts cannot be read: to try again would end the same.
        if entries is None:
            segment.evicted.remove(part)
            return False
        num_slots = segment.geometry.slots_for(entries.num_entries, entries.bits)
        num_slots = self._tree.largest(num_slots, segment.start, segment.num_slots)
        if num_slots:  # else all its entries were of tokens that were cut off
            slots = self._tree.alloc(num_slots)
            if slots is None:
                return False
            if self.next_of(segment) is not part or segment.live_end != end:  # it shrank, or was cut, for the slots
                self._tree.free(slots)
                return False
            packed = None
            # Before anything changes: the device may lack the memory for it.
            with self._guard.at(Place.HOST):
                packed = self._packer.extended(segment.packed, entries, slots)
            if packed is None:
                self._tree.free(slots)
                return False
            self._resizer.grow(segment, packed)
        segment.evicted.remove(part)
        return True
