"""Makes segments of paths, and changes their size between two steps, while requests read them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import NamedTuple

from torch import Tensor

from sgl_kvevict.cache.core import Core
from sgl_kvevict.cache.nodes import Node, Reader, length_of, path_to
from sgl_kvevict.cache.records import OpenRange
from sgl_kvevict.copies import CopiedRows
from sgl_kvevict.errors import InvariantError
from sgl_kvevict.guard import Place, accounting
from sgl_kvevict.segments.prompt_observation import CacheObservation, Observation, PromptObservation
from sgl_kvevict.segments.segment import Order, Packed, Segment, View
from sgl_kvevict.segments.sources import Source, TokenRange

TURNS_OF_RANKING = 2
"""Turns of the scheduler's loop from launching a ranking beside the scheduler's stream to the use of its order; at
least one step is launched in between. Turns are counted because tensor-parallel ranks would not agree on whether a
stream is done."""


JOINED = 8
"""Small segments at the end of a path that become one, because attention reads each as a span of its own."""
MOST_JOINED = 2**14
"""Tokens of :data:`JOINED` segments that are small, at most: larger ones are few."""
MAX_OPEN = 1024
"""Open ranges that do not wait, beyond which one that a reader holds is given up."""
OBSERVATION_BYTES = 256 * 1024**2
"""Memory outside the pool for observations of open ranges; beyond it the oldest is given up."""


class _Written(NamedTuple):
    """What was written of a range, up to ``end``, and what was evicted from it (None: nothing is kept of that)."""

    packed: Packed
    freed: Tensor
    end: int
    num_merged: int
    evicted: CopiedRows | None


class Resizer:
    """Makes segments of paths, has their entries ranked, and changes their size.

    :meth:`compress` is the only function that makes segments of tokens in the pool; :meth:`resize` and :meth:`grow` are
    the only ones that change a segment's token slots, rows, spans and their charges in the tree. (:meth:`exchange` also
    serves segments that come from outside the pool.)

    What cannot be compressed yet is an open range (:class:`OpenRange`): a request with ``exact`` reads it, its order is
    being computed, or it is to wait until slots are short. On a GPU an order is computed beside the next step, and used
    :data:`TURNS_OF_RANKING` turns later, or when slots are short.

    Attributes:
        on_budget: called with the last node of each segment that has reached the budget; None: nobody waits for that.
    """

    def __init__(self, core: Core) -> None:
        self.on_budget: Callable[[Node], None] | None = None
        self._tree, self._table, self._readers, self._guard = core.tree, core.table, core.readers, core.guard
        self._spans, self._complements, self._compressor = core.table.spans, core.complements, core.compressor
        self._packer, self._config = core.compressor.packer, core.compressor.config
        self.observation_bytes, self.num_joined = OBSERVATION_BYTES, JOINED
        self._turn, self._has_released = 0, False

    # ---- sizes ------------------------------------------------------------------------------------------------

    def is_long_enough(self, num_tokens: int) -> bool:
        """Whether a range reaches ``min_prefix_tokens``."""
        return num_tokens >= self._config.min_prefix_tokens

    @property
    def block_share(self) -> float | None:
        """Share of a block of an answer until it shrinks with others; None: the budget, because blocks are large."""
        block = self._compressor.answer_block or 0
        return self._config.fresh_share if block * JOINED <= MOST_JOINED else None

    def slots_at(self, segment: Segment, share: float | None = None) -> int:
        """Token slots of a segment at a share of its bytes; None: at the budget."""
        return self._config.num_slots(segment.num_tokens, segment.start, share)

    # ---- open ranges ------------------------------------------------------------------------------------------

    def compress(
        self,
        last: Node,
        most: int | None = None,
        prompt: PromptObservation | None = None,
        *,
        share: float | None = None,
        waits: bool = False,
        goes_on: bool = False,
    ) -> None:
        """Compress the uncompressed tokens of the path to a node, now or as soon as possible.

        Args:
            last: the node; it, or one above, is split where what is compressed ends (:meth:`Compressor.end_of`).
            most: not behind so many first tokens of the path; None: to its end.
            prompt: its observation, by which they are ranked; None: they are ranked by the one that is known.
            share: of their bytes; None: the budget.
            waits: they stay uncompressed until token slots are short.
            goes_on: more tokens follow, so that the last ones are worth no more than others.
        """
        nodes, start, end = self._spans.open_part(last)
        end = end if most is None else min(end, most)
        end = end if goes_on else self._compressor.end_of(end)
        if not self.is_long_enough(end - start):
            return
        last = self._node_ending_at(nodes, start, end)
        opened = self._table.open_range(last, share, waits=waits)
        opened.goes_on = goes_on
        # A prompt that has computed at most the last token of the range, as SGLang always does, is no better.
        if prompt is not None and (opened.prompt is None or prompt.first_query < end - 1):
            opened.prompt, opened.num_bytes = prompt, prompt.num_bytes
        if not opened.waits and self._try(last) is None:
            self._table.totals.refused_in_use += 1
            # Each release tries all that are left. Without this, one long request with `exact` would let them pile up.
            if sum(not each.waits for each in self._table.open.values()) > MAX_OPEN:
                self._table.close(last)
        if last in self._table.open:
            self._trim()

    def _node_ending_at(self, nodes: Sequence[Node], position: int, end: int) -> Node:
        """The one of consecutive nodes from ``position`` on that ends at ``end``; one that contains it is split."""
        for node in nodes:
            position += len(node.key)
            if position >= end:
                return node if position == end else self._tree.cut(node, end)
        raise InvariantError(f"the path has {position} tokens, expected at least {end}")

    def _trim(self) -> None:
        """Give up the oldest prompts beyond :data:`OBSERVATION_BYTES`, and the open ranges that need them.

        A range that waits and could not be ranked any more is compressed before, if nothing holds it.
        """
        num_bytes = self._table.observation_bytes
        for last, opened in list(self._table.open.items()):
            if num_bytes <= self.observation_bytes:
                break
            if not opened.num_bytes:
                continue
            num_bytes -= opened.num_bytes
            if opened.waits and not self._compressor.scores_any_range:
                # It could not be ranked later, so it is packed while its prompt is still there.
                self._try(last, set(self._readers.movable_nodes()))
            opened.prompt, opened.num_bytes = None, 0
            if last in self._table.open and opened.order is None and not self._can_rank(opened):
                self._table.close(last)
                self._table.totals.refused_no_memory += 1

    def between_steps(self) -> bool:
        """Use the orders that were computed beside the last step; return whether slots were released since then."""
        self._turn += 1
        if any(opened.is_launched for opened in self._table.open.values()):
            self.try_open()
        has_released, self._has_released = self._has_released, False
        return has_released

    def try_open(self, movable: set[Node] | None = None) -> int:
        """Compress open ranges but those that wait until slots are short, oldest first; ``movable`` as in :meth:`_try`.

        Returns the token slots released.
        """
        num_released, held = 0, set[Node]()
        # A copy: a range that is packed leaves the table.
        ranges = list(self._table.open.items())
        if movable is None:
            # Ranges that are not ranked yet may have waited because they begin with the tokens of these.
            ranges.sort(key=lambda each: not each[1].is_launched)
        for last, opened in ranges:
            if opened.waits or (first := self._spans.first_uncompressed(last)) in held:
                continue
            num_freed = self._try(last, movable)
            if num_freed is None:
                # Not asked again: it walks the paths of all readers, and none comes or goes meanwhile.
                held.add(first)
            num_released += num_freed or 0
        return num_released

    def try_waiting(self, last: Node, movable: set[Node]) -> int:
        """Slots are short: compress an open range that waited for that, or another one that begins with the same node.

        If this node has readers, the ranges that begin with it are tried in the order in which :meth:`reclaimable` has
        counted them: what the one takes is not the other's. ``movable`` as in :meth:`_try`. Returns the token slots
        released. 0: none can be compressed now; if the range is closed, it never can.
        """
        first_of, alike = self._spans.first_uncompressed, [last]
        if (first := first_of(last)) in movable:
            alike = [each for each, opened in self._table.open.items() if opened.waits and first_of(each) is first]
        for each in sorted(alike, key=lambda each: each not in movable):
            num_released = self._try(each, movable)
            if num_released or each is last:
                return num_released or 0
        return 0

    def reclaimable(self, movable: Sequence[Node]) -> int:
        """Token slots of locked nodes that open ranges would release when slots are short.

        ``movable``: :meth:`ReaderTable.movable_nodes`. Nodes without readers do not count: they can be dropped. Ranges
        are counted in the order in which they are tried: those that need not wait, those that end with a locked node,
        as a running request's prompt does, and if enough of what is locked is left for them, the others. SGLang asks
        several times for each request that it admits, so thousands of ranges that nobody reads must take no time.
        """
        ranges, locked, taken, num_reclaimable = self._table.open, set(movable), set[Node](), 0
        ends = [last for last, opened in ranges.items() if not opened.waits or last in locked]
        rest = self._spans.uncompressed(movable)
        for lasts in (sorted(ends, key=lambda last: ranges[last].waits), ranges):
            for last in lasts:
                if self._spans.first_uncompressed(last, taken) not in locked:
                    continue
                nodes, _, end = self._spans.open_part(last)
                nodes = [node for node in nodes if node not in taken]
                gain = self._gain(ranges[last], nodes, end - length_of(nodes), locked)
                if gain is not None:
                    # Tokens that two ranges share are released once: counted twice, admission would promise too much.
                    taken.update(nodes)
                    num_reclaimable += gain
            rest = [node for node in rest if node not in taken]
            is_shared = any(not locked.issuperset(node.children.values()) for node in rest)
            if not (is_shared and self.is_long_enough(length_of(rest))):
                break
        return num_reclaimable

    def _gain(self, opened: OpenRange, nodes: Sequence[Node], start: int, locked: set[Node]) -> int | None:
        """Token slots that others can have, and could not before, once a range's nodes have shrunk as far as they may.

        None: they are not compressed when slots are short.
        """
        if not self.is_long_enough(length_of(nodes)) or not (opened.order is not None or self._can_rank(opened)):
            return None
        if nodes[0] not in locked and self._tree.num_locks(nodes[0]):
            return None
        num_reclaimable, least = 0, self._config.shares[-1]
        for group in self._groups(nodes, start, locked):
            num_locked = sum(len(node.key) for node in group if node in locked)
            num_reclaimable += max(num_locked - self._config.num_slots(length_of(group), start, least), 0)
            start += length_of(group)
        return num_reclaimable

    def _groups(self, nodes: Sequence[Node], start: int, locked: set[Node]) -> list[list[Node]]:
        """Consecutive nodes by the segments that they become: one, if it can be split.

        Segments that cannot be split end where prompts branch off, or a running request's path ends. When slots are
        short (``locked``: nodes with readers), so does one whose locked nodes hold fewer tokens than the whole would
        take slots, as the first tokens of a chat template: a reader locks all slots of a segment.
        """
        least = self._config.num_slots(length_of(nodes), start, self._config.shares[-1]) if locked else 0
        has_few_locked = length_of([node for node in nodes if node in locked]) < least
        groups = [[nodes[0]]]
        for node in nodes[1:]:
            above = groups[-1][-1]
            is_end = has_few_locked and above in locked and node not in locked
            if not self._compressor.splittable:
                is_end |= len(above.children) > 1 or self._tree.num_locks(above) != self._tree.num_locks(node)
            if is_end:
                groups.append([])
            groups[-1].append(node)
        return groups

    # ---- order ------------------------------------------------------------------------------------------------

    def _can_rank(self, opened: OpenRange) -> bool:
        """Whether a range can be ranked now: by learned scores, or by what its prompt has left."""
        compressor = self._compressor
        return compressor.scores_any_range or opened.prompt is not None or not compressor.observes.collectors

    def _rank(self, nodes: Sequence[Node], start: int, opened: OpenRange) -> Order | None:
        """Launch the order of uncompressed nodes, the first of which begins at ``start``; None: the policy failed."""
        order: Order | None = None
        with self._guard.at(Place.COMPRESSION):
            slots = self._tree.token_slots(nodes)
            observation = opened.prompt or CacheObservation(opened.goes_on)
            order = self._compressor.rank(slots, start, observation, self._turn, opened.share)
        return order

    def _is_early(self, opened: OpenRange) -> bool:
        """Whether a range's ranking was launched so recently that maybe no step was launched after it."""
        order = opened.order
        return order is not None and order.turn is not None and self._turn < order.turn + TURNS_OF_RANKING

    def _try(self, last: Node, movable: set[Node] | None = None) -> int | None:
        """Compress an open range if that is possible now.

        ``movable``: token slots are short, and these are the nodes of :meth:`ReaderTable.movable_nodes`; None: they are
        not short. Returns the token slots released. None: a reader that must not move holds it.
        """
        opened = self._table.open.get(last)
        if opened is None:
            return 0
        nodes, start, end = self._spans.open_part(last)
        if not self.is_long_enough(end - start):
            self._table.close(last)
            return 0
        is_short, locked = movable is not None, movable or set()
        # Before readers are asked for: of thousands of ranges that cannot be packed each takes little time.
        if is_short and self._gain(opened, nodes, start, locked) is None:
            return 0
        readers = self._readers.movable(nodes[0])
        if readers is None:
            return None
        # A ranking beside the scheduler's stream reads slots that another range with the same beginning would release.
        if not is_short and (self._is_early(opened) or (not opened.is_launched and self._is_early_at(nodes[0]))):
            return 0
        groups = self._groups(nodes, start, locked)
        if not self._has_order(opened, groups, start, end):
            # The policy failed for it, and would again; or nothing is left by which it could be ranked.
            self._table.close(last)
            return 0
        if self._is_early(opened) and not is_short:
            return 0
        return self._pack(last, opened, groups, start, readers)

    def _is_early_at(self, first: Node) -> bool:
        """Whether a ranking was launched recently of a range that begins with a node."""
        return any(
            self._is_early(opened) and self._spans.first_uncompressed(last) is first
            for last, opened in self._table.open.items()
        )

    def _has_order(self, opened: OpenRange, groups: Sequence[Sequence[Node]], start: int, end: int) -> bool:
        """Launch the order of a range if it has none for its bounds; False: it needs one, and cannot be ranked.

        If the range becomes several segments, each is ranked by itself when it is written.
        """
        if len(groups) > 1:
            return opened.order is not None or self._can_rank(opened)
        order, num_slots = opened.order, self._config.num_slots(end - start, start, opened.share)
        if order is not None and (order.start, order.end) != (start, end):  # its beginning was compressed meanwhile
            opened.order = None if self._can_rank(opened) else order.within(start, end)
        if opened.order is None and num_slots < end - start:
            opened.order = self._rank(groups[0], start, opened) if self._can_rank(opened) else None
            return opened.order is not None
        return True

    # ---- segments ---------------------------------------------------------------------------------------------

    def _pack(
        self, last: Node, opened: OpenRange, groups: Sequence[Sequence[Node]], start: int, readers: Sequence[Reader]
    ) -> int:
        """Make segments of groups of consecutive uncompressed nodes, which have the readers of the first one at most.

        Returns the token slots released. After an error of the policy the range is closed, and its rest stays as it is.
        """
        num_released = 0
        for group in groups:
            order = opened.order
            if len(groups) > 1 and self._can_rank(opened):
                order = self._rank(group, start, opened)
            elif len(groups) > 1 and order is not None:
                order = order.within(start, start + length_of(group))
            num_freed = self._make(group, start, order, opened, readers)
            if num_freed is None:
                break
            num_released += num_freed
            start = self._spans[group[-1]].end
        self._table.close(last)
        return num_released

    def _make(
        self, nodes: Sequence[Node], start: int, order: Order | None, opened: OpenRange, readers: Sequence[Reader]
    ) -> int | None:
        """Make a segment of consecutive uncompressed nodes in their first slots; return the token slots released.

        None: the policy failed, and nothing was changed.
        """
        begin, num_tokens, totals = time.perf_counter(), length_of(nodes), self._table.totals
        num_slots = self._config.num_slots(num_tokens, start, opened.share)
        if order is None and num_slots < num_tokens:
            return None  # ranking failed, and nothing else says what to keep
        num_sinks = self._config.num_sinks(num_tokens, start)
        written = self._write(
            lambda: TokenRange(self._tree.token_slots(nodes), start, order.keys if order else None, num_sinks),
            num_slots,
            opened.prompt,
        )
        if written is None:
            return None
        geometry = self._packer.geometry
        segment = Segment(geometry, start, written.end, written.packed)
        segment.splittable = not (geometry.has_windows and num_slots < num_tokens)
        self.exchange(nodes, segment, readers)
        # After the exchange: slots may go to another request only when no row and no node names them.
        num_freed = self._released(segment, written)
        totals.compressions += 1
        totals.compressed_tokens += num_tokens
        totals.compression_seconds += time.perf_counter() - begin
        totals.released_slots += num_freed
        totals.kept_entries += segment.num_entries
        totals.merged_entries += written.num_merged
        totals.evicted_entries += num_tokens * geometry.num_runs - segment.num_entries - written.num_merged
        self._report_size(segment, nodes[-1], num_slots)
        return num_freed

    def resize(self, segment: Segment, num_slots: int) -> int:
        """Let a segment shrink.

        The best entries of its order are written into the first of its slots, as many as fit into ``num_slots``
        (:meth:`Source.best`). The other slots are released; returns how many. Readers read the new rows from their next
        step on. While a reader must not move (:meth:`ReaderTable.movable`), or if the policy fails, nothing is changed
        and 0 slots are released.
        """
        nodes = self._spans.views_of(self._table.packed[segment])
        readers, num_live = self._readers.movable(nodes[0]), segment.num_live_entries
        if readers is None:
            return 0
        written = self._write(lambda: segment.live_view, num_slots)
        if written is None:
            return 0
        self.exchange(nodes, segment, readers, written.packed, written.end)
        num_freed, totals = self._released(segment, written), self._table.totals
        totals.resizes += 1
        totals.resized_slots += num_freed
        totals.evicted_entries += num_live - segment.num_entries
        self._report_size(segment, nodes[-1], num_slots)
        return num_freed

    def settle(self, path: Sequence[Node], start: int, *, is_complete: bool) -> None:
        """Let the last blocks of an answer shrink to the budget together, once :attr:`num_joined` are small.

        Together, because what is worth keeping may all lie in one. As one segment, because attention reads each segment
        as spans of its own. Blocks that others read in parts stay as they are until the answer is complete.

        ``start`` is the logical position of the answer's first token. ``is_complete``: no block follows, so those that
        are there shrink now.
        """
        segments = list(dict.fromkeys(self._spans[node].segment for node in path if node in self._spans))
        bits = segments[-1].packed.rows.bits if segments else 16
        small = list(takewhile(lambda each: self._is_small(each, start, bits), reversed(segments)))[::-1]
        if len(small) < self.num_joined and not is_complete:
            return
        joined = self._joined(small)
        for segment in [joined] if joined else segments if is_complete else ():
            num_slots = self.slots_at(segment)
            # What a prompt left above the budget is not the answer's. Without an order nothing can be chosen.
            if segment.end > start and num_slots < segment.num_slots and segment.keys is not None:
                self.resize(segment, num_slots)

    def _joined(self, segments: Sequence[Segment]) -> Segment | None:
        """One segment in the place of several that follow each other on a path; None: they stay as they are.

        No entry is evicted, and no row moves. Nothing is joined that others read, or have read, in parts: who locks a
        segment locks all of its slots.
        """
        # All nodes of the last one, too: the path may end inside it, where another answer goes on.
        nodes = [node for segment in segments for node in self._spans.views_of(self._table.packed[segment])]
        if len(segments) < 2 or any(len(node.children) > 1 for node in nodes[:-1]):
            return None
        readers = self._readers.movable(nodes[0])
        if readers is None or self._tree.num_locks(nodes[0]) != self._tree.num_locks(nodes[-1]):
            return None
        packed: Packed | None = None
        with self._guard.at(Place.COMPRESSION):
            packed = self._packer.joined(segments)
        if packed is None:
            return None
        segment = Segment(self._packer.geometry, segments[0].start, segments[-1].end, packed)
        segment.evicted = [part.within(each.start, each.end) for each in segments for part in each.evicted]
        self.exchange(nodes, segment, readers)
        return segment

    def _is_small(self, segment: Segment, start: int, bits: int) -> bool:
        """Whether a segment is one of those that become one: all of it is there, and its order is known."""
        is_whole = segment.live_end == segment.end and segment.splittable and segment.keys is not None
        is_alike = segment.packed.rows.bits == bits
        # A prompt that is too short by itself is a part of the first block.
        return is_whole and is_alike and segment.end > start and segment.num_tokens * JOINED <= MOST_JOINED

    def _write(
        self, of: Callable[[], TokenRange | View], num_slots: int, prompt: Observation | None = None
    ) -> _Written | None:
        """Write the best entries of a range into the first of its slots; None: the policy failed, nothing is written.

        A new segment takes only the slots that its entries need. One that shrinks takes ``num_slots`` on all
        tensor-parallel ranks, whose entries may differ in number.
        """
        written: _Written | None = None
        with self._guard.at(Place.COMPRESSION):
            source, merge = Source(self._packer.geometry, of()), None
            if num_slots < source.token_slots.numel():
                source = source.best(num_slots, self._config.bits)
                merge = self._compressor.merge(source, prompt or CacheObservation())
            evicted = self._complements.evicted(source)
            size = num_slots if isinstance(source.range, View) else source.fewest_slots
            packed, freed = self._packer.rewrite(source, size, merge)
            num_merged = 0 if merge is None else merge.indices.numel() - source.kept.num_entries
            written = _Written(packed, freed, source.end, num_merged, evicted)
        return written

    @accounting()
    def _released(self, segment: Segment, written: _Written) -> int:
        """Release the slots that a segment has lost, and keep what was evicted; return how many slots."""
        self._tree.free(written.freed)
        self._has_released |= written.freed.numel() > 0
        segment.evicted += self._complements.put(written.evicted, segment.start, segment.end)
        return written.freed.numel()

    def _report_size(self, segment: Segment, last: Node, num_slots: int) -> None:
        """Tell the store if a segment, whose last span ``last`` holds, has reached the budget."""
        if self.on_budget is not None and num_slots == self.slots_at(segment):
            self.on_budget(last)

    @accounting()
    def grow(self, segment: Segment, packed: Packed) -> None:
        """Give a packed segment its storage with entries that had been evicted: :meth:`SegmentPacker.extended`.

        Rows that it has stay where they are, so readers need not move: they read the new rows, too, from their next
        step on.
        """
        owner, totals = self._table.packed[segment], self._table.totals
        num_slots, num_entries = segment.num_slots, segment.num_entries
        segment.grow(packed)
        self._tree.charge(owner, segment.num_slots - num_slots)
        self._table.resized(owner)
        totals.growths += 1
        totals.grown_slots += segment.num_slots - num_slots
        totals.returned_entries += segment.num_entries - num_entries

    @accounting()
    def exchange(
        self,
        nodes: Sequence[Node],
        segment: Segment,
        readers: Sequence[Reader],
        packed: Packed | None = None,
        end: int = 0,
    ) -> None:
        """Let consecutive nodes hold the spans of one segment, charge them, and move their readers.

        Args:
            nodes: root side first; they are uncompressed, or hold all spans of the segment.
            segment: its rows are written, or being written on the scheduler's stream.
            readers: of the first node, see :meth:`ReaderTable.movable`.
            packed: new storage of the segment; None: it is new.
            end: logical position after the last token of the new storage.
        """
        # Read first: the charges below are differences to what the tree counts now.
        spans = [self._spans.get(node) for node in nodes]
        before = [span.charged_slots if span else len(node.key) for node, span in zip(nodes, spans, strict=True)]
        if packed is not None:
            segment.pack(packed, end)
        self._table.hold(nodes, segment)
        for node, span, slots in zip(nodes, spans, before, strict=True):
            self._tree.charge(node, self._spans[node].charged_slots - slots)
            if span is None:
                self._tree.hold_span(node)
        for reader in readers:  # from their next forward on, they read the packed tokens of their paths from spans
            last = self._tree.locked_by(reader)
            assert last is not None
            self._tree.clear_slots(reader, self._spans.compressed_len(path_to(last)))

    def repack(self, owner: Node, end: int) -> Tensor:
        """Write the entries before ``end`` of a packed segment, whose last span was dropped, into fewer slots.

        Tensor-parallel ranks keep different entries and may need different numbers of slots. They repack the same spans
        at the same time, and all take the largest number. Returns [num_freed], int64, token slots to release; none if
        the device lacks the memory for it: entries that nobody reads then stay until the segment shrinks.
        """
        segment = self._spans[owner].segment
        # sync: only when a node below another view of its segment is dropped
        source = Source(self._packer.geometry, View(segment, segment.start, end))
        segment.live_count, segment.live_end = source.count, end
        num_slots = self._tree.largest(source.fewest_slots, segment.start, end, segment.num_slots)
        if num_slots == segment.num_slots:
            return segment.packed.token_slots[:0]
        freed = segment.packed.token_slots[:0]
        with self._guard.at(Place.COMPRESSION) as attempt:
            packed, freed = self._packer.rewrite(source, num_slots)
        if not attempt.failed:
            self.exchange(self._spans.views_of(owner), segment, (), packed, end)
        return freed
