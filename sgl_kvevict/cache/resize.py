"""Changes the size of segments between two steps, while requests read them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from enum import Enum, auto
from itertools import pairwise

from torch import Tensor

from sgl_kvevict.cache.complements import Complements
from sgl_kvevict.cache.nodes import Node, Reader, path_to
from sgl_kvevict.cache.ports import TreePort
from sgl_kvevict.cache.readers import ReaderTable
from sgl_kvevict.cache.records import PrefixTable
from sgl_kvevict.errors import InvariantError
from sgl_kvevict.guard import Guard, Place, accounting
from sgl_kvevict.ragged import MergePlan
from sgl_kvevict.segments import (
    CacheObservation,
    Compressor,
    CopiedEntries,
    Observation,
    PromptObservation,
    Rewritten,
    Segment,
    Sources,
    TokenRange,
    View,
)

TURNS_OF_RANKING = 2
"""Turns of the scheduler's loop from launching a ranking beside the scheduler's stream to the use of its order; at
least one step is launched in between. Turns are counted because tensor-parallel ranks would not agree on whether a
stream is done."""


class Occasion(Enum):
    """Why segments that are to shrink to the budget are tried."""

    RELEASED = auto()
    """A reader was released, or a prompt is complete."""
    TURN = auto()
    """The scheduler is between two steps."""
    SHORT = auto()
    """Token slots are short."""


class Resizer:
    """Makes segments of paths, has their entries ranked, and changes their size.

    :meth:`resize` and :meth:`grow` are the only functions that change a segment's token slots, rows, spans and their
    charges in the tree. (The last part of ``resize``, :meth:`exchange`, also serves segments that come from outside the
    pool.) The other methods decide which segments are resized, and when.

    A range that is to shrink to the budget is *wanted* until it has shrunk. It may have to wait until a request with
    ``exact`` has ended, or until its order is computed. On a GPU an order is computed beside the next step, and used
    :data:`TURNS_OF_RANKING` turns later, or when slots are short.

    Attributes:
        on_budget: called with the last node of each segment that has reached the budget.
        complements: what has been evicted, and can come back.
    """

    def __init__(
        self,
        tree: TreePort,
        table: PrefixTable,
        readers: ReaderTable,
        compressor: Compressor,
        guard: Guard,
        complements: Complements,
    ) -> None:
        self.on_budget: list[Callable[[Node], None]] = []
        self.complements = complements
        self._tree = tree
        self._table = table
        self._spans = table.spans
        self._readers = readers
        self._compressor = compressor
        self._packer = compressor.packer
        self._config = compressor.config
        self._guard = guard
        self._turn = 0

    # ---- ranges -----------------------------------------------------------------------------------------------

    def is_long_enough(self, num_tokens: int) -> bool:
        """Whether a range reaches ``min_prefix_tokens``."""
        return num_tokens >= self._config.min_prefix_tokens

    def slots_at(self, segment: Segment, share: float | None = None) -> int:
        """Token slots of a segment at a share of its bytes; None: at the budget."""
        return self._config.num_slots(segment.num_tokens, segment.start, share)

    def node_ending_at(self, path: Sequence[Node], end: int) -> Node:
        """Node of a path that ends at position ``end``; a node that contains ``end`` is split."""
        position = 0
        for i, node in enumerate(path):
            position += len(node.key)
            if position == end:
                return node
            if position > end:
                return self._tree.cut(path[: i + 1], end)
        raise InvariantError(f"the path has {position} tokens, expected at least {end}")

    def begins_segment(self, above: Node, node: Node) -> bool:
        """Whether two nodes of a range become different segments.

        Segments that cannot be split end where prompts branch off, or a running request's path ends.
        """
        if self._compressor.splittable:
            return False
        return len(above.children) > 1 or self._tree.num_locks(above) != self._tree.num_locks(node)

    # ---- segments in place ------------------------------------------------------------------------------------

    def cover(self, path: Sequence[Node], end: int, prompt: Observation, num_bytes: int) -> None:
        """Let the uncompressed tokens of a path up to ``end`` shrink when slots are short, ranked by a prompt.

        They become segments in place of at least ``min_prefix_tokens``, which end where nodes end.
        """
        segments = self._table.chain([node for node in path if self._spans.of(node) is not None])
        position = start = self._covered(path)
        nodes: list[Node] = []
        for node in path:
            if self._spans.of(node) is not None or position >= end:
                continue
            last = min(position + len(node.key), end)
            if self.is_long_enough(last - start):
                nodes.append(self.node_ending_at(path, last))
                segments.append(self._table.cover(nodes, start))
                nodes, start = [], last
            else:
                nodes.append(node)
            position += len(node.key)
        for segment in segments:
            if segment.end <= end:
                if num_bytes or prompt.num_bytes:
                    self._table.prompts.give(segment, prompt, num_bytes)
                self._table.shrinking.add(self._table.in_place[segment])
        self._trim()

    def range_to(self, path: Sequence[Node], end: int) -> list[Segment]:
        """Segments in place of all uncompressed tokens of a path up to ``end``, root side first."""
        path = path_to(self.node_ending_at(path, end))
        self._table.chain(path)
        nodes = [node for node in path if self._spans.of(node) is None]
        if nodes:
            self._table.cover(nodes, self._covered(path))
        return self._table.chain(path)

    def _covered(self, path: Sequence[Node]) -> int:
        """Where the last segment of a path ends, in place or packed."""
        return max((span.end for node in path if (span := self._spans.of(node)) is not None), default=0)

    def _trim(self) -> None:
        """Give up the oldest prompts beyond ``observation_bytes``, and the wanted ranges that need them."""
        for segment in self._table.prompts.trim(self._config.observation_bytes):
            if segment in self._table.wanted and segment.order is None and not self.can_rank(segment):
                del self._table.wanted[segment]
                self._table.totals.refused_no_memory += 1

    # ---- order ------------------------------------------------------------------------------------------------

    def can_rank(self, segment: Segment) -> bool:
        """Whether a segment in place can be ranked now: by learned scores, or by what its prompt has left."""
        compressor = self._compressor
        return compressor.scores_any_range or segment.prompt is not None or not compressor.observes.collectors

    def _rank(self, segment: Segment) -> bool:
        """Launch the order of a segment in place; False if it cannot be ranked, or the policy failed."""
        if not self.can_rank(segment):
            return segment.order is not None
        observation: Observation = segment.prompt or CacheObservation()
        with self._guard.at(Place.COMPRESSION) as attempt:
            slots = self._tree.token_slots(self._table.nodes_of(segment))
            segment.order = self._compressor.rank(slots, segment.start, observation, self._turn)
        return not attempt.failed

    def _regroup(self, segments: Sequence[Segment]) -> list[Segment]:
        """Turn consecutive segments in place into those that will be packed, root side first.

        If segments can be split, that is one segment. The order of a range with other bounds is forgotten, if the new
        segment can be ranked.
        """
        if self._compressor.splittable:
            pieces = [self._table.join(segments)]
        else:
            pieces = self._joined_where_possible(self._cut_where_segments_end(segments))
        for piece in pieces:
            if piece.order is not None and self.can_rank(piece) and not _is_exact(piece):
                piece.order = None
        return pieces

    def _cut_where_segments_end(self, segments: Sequence[Segment]) -> list[Segment]:
        pieces: list[Segment] = []
        for segment in segments:
            groups: list[list[Node]] = [[]]
            for node in self._table.nodes_of(segment):
                if groups[-1] and self.begins_segment(groups[-1][-1], node):
                    groups.append([])
                groups[-1].append(node)
            pieces += self._table.divide(segment, groups)
        return pieces

    def _joined_where_possible(self, pieces: Sequence[Segment]) -> list[Segment]:
        """Join neighbours that need not be segments of their own, and were not ranked as such."""
        groups = [[pieces[0]]]
        for above, piece in pairwise(pieces):
            must_end = self.begins_segment(self._table.in_place[above], self._table.nodes_of(piece)[0])
            if must_end or (_is_exact(above) and _is_exact(piece)):
                groups.append([])
            groups[-1].append(piece)
        return [self._table.join(group) for group in groups]

    # ---- ranges that shrink to the budget ---------------------------------------------------------------------

    def shrink(self, path: Sequence[Node], end: int, prompt: PromptObservation | None = None) -> None:
        """Let the uncompressed tokens of a path up to ``end`` shrink to the budget, now or as soon as possible.

        Without ``prompt`` they are ranked by the one that has covered them.
        """
        if not self.is_long_enough(end - self._spans.compressed_len(path)):
            return
        segment = self.range_to(path, end)[-1]
        # A prompt that has computed nothing of the range is no better than the one that did.
        if prompt is not None and (segment.prompt is None or prompt.first_query < segment.end):
            self._table.prompts.give(segment, prompt, prompt.num_bytes)
        self._table.wanted[segment] = None
        if self._try(segment, Occasion.RELEASED) is None:
            self._table.totals.refused_in_use += 1
        self._trim()

    def try_wanted(self, occasion: Occasion) -> int:
        """Let wanted ranges shrink, oldest first; return the token slots released."""
        num_released = 0
        for segment in list(self._table.wanted):
            if segment in self._table.wanted and (occasion is Occasion.RELEASED or is_launched(segment)):
                num_released += self._try(segment, occasion) or 0
        return num_released

    def between_steps(self) -> None:
        """Use the orders that were computed beside the last step."""
        self._turn += 1
        if any(map(is_launched, self._table.wanted)):
            self.try_wanted(Occasion.TURN)
            self.try_wanted(Occasion.RELEASED)  # ranges that waited because they begin with the same tokens

    def _is_early(self, segment: Segment) -> bool:
        """Whether a segment's ranking was launched so recently that maybe no step was launched after it."""
        order = segment.order
        return order is not None and order.turn is not None and self._turn < order.turn + TURNS_OF_RANKING

    def _try(self, segment: Segment, occasion: Occasion) -> int | None:
        """Let a wanted range shrink to the budget if it can.

        Returns the token slots released. None: a reader that must not move holds it.
        """
        path = path_to(self._table.in_place[segment])
        chain = self._table.chain(path)
        if not self.is_long_enough(segment.end - chain[0].start):
            del self._table.wanted[segment]
            return 0
        if self._readers.movable(self._table.nodes_of(chain[0])[0]) is None:
            return None
        if self._is_early(segment) and occasion is not Occasion.SHORT:
            return 0
        if not is_launched(segment) and any(map(self._is_early, chain[:-1])):
            return 0
        pieces = self._regroup(chain)
        todo = [piece for piece in pieces if piece.order is None and self.slots_at(piece) < piece.num_slots]
        ranked = [self._rank(piece) for piece in todo]
        if not all(ranked):
            self._table.wanted.pop(pieces[-1], None)
            self._discard(pieces)
            return 0
        if any(self._is_early(piece) for piece in todo):
            return 0
        return self._pack(pieces)

    def _discard(self, segments: Sequence[Segment]) -> None:
        """Remove segments in place that cannot be ranked from those that shrink: admission must not count on them."""
        for segment in segments:
            self._table.shrinking.discard(self._table.in_place[segment])

    def shrink_now(self, segments: Sequence[Segment], share: float) -> int:
        """Pack consecutive segments in place, each at a share of its bytes.

        Returns the token slots released. After an error of the policy the rest stays in place, and shrinks no more.
        """
        return self._pack(self._regroup(segments), share)

    def _pack(self, pieces: Sequence[Segment], share: float | None = None) -> int:
        num_released = 0
        for i, piece in enumerate(pieces):
            num_slots = self.slots_at(piece, share)
            is_ranked = num_slots == piece.num_slots or piece.order is not None or self._rank(piece)
            freed = self.resize([piece], num_slots) if is_ranked else 0
            if piece.packed is None:
                self._table.wanted.pop(pieces[-1], None)
                self._discard(pieces[i:])
                break
            num_released += freed
        return num_released

    def join(self, path: Sequence[Node]) -> None:
        """Write the last packed segments of a path as one, so that their entries compete for its slots.

        From the end of the path on, up to the first segment that has a span outside the path. Nothing happens while a
        reader is not movable.
        """
        segments: list[Segment] = []
        start = self._spans.compressed_len(path)
        for owner in reversed(self._spans.owners(path)):
            segment = self._spans[owner].segment
            if segment.end != start or not _is_joinable(segment):
                break
            segments.insert(0, segment)
            start = segment.start
        if len(segments) > 1:
            # Ranks fill their slots differently, so the joined segment keeps all of them on each rank.
            self.resize(segments, sum(segment.num_slots for segment in segments))

    def at_budget(self, last: Node) -> None:
        """A segment has reached the budget; ``last`` is the last node with a span of it."""
        for call in self.on_budget:
            call(last)

    # ---- size -------------------------------------------------------------------------------------------------

    def resize(self, segments: Sequence[Segment], num_slots: int) -> int:
        """Give a segment another size, or make consecutive packed segments of one path one, the first of them.

        The best entries of their order are written into the first of their slots, in rows of 16, 8 or 4 bits: how many
        of each fit into ``num_slots`` is :func:`~sgl_kvevict.widths.rows_that_fit` (docs/design.md, "Packing"). The
        other slots are released. Readers read the new rows from their next step on. While a reader must not move
        (:meth:`ReaderTable.movable`), or if the policy fails, nothing is changed and 0 slots are released.

        Args:
            segments: root side first. If ``num_slots`` is less than they hold, they need an order.
            num_slots: token slots afterwards, at most.

        Returns:
            Token slots released.

        Raises:
            InvariantError: more slots than the segments have, see :meth:`grow`.
        """
        held = sum(segment.num_slots for segment in segments)
        if num_slots > held:
            raise InvariantError(f"a resize cannot give segments of {held} token slots {num_slots}")
        nodes = [node for segment in segments for node in self._table.nodes_of(segment)]
        readers = self._readers.movable(nodes[0])
        if readers is None:
            return 0
        is_new = segments[0].packed is None
        num_live, begin = segments[0].num_live_entries, time.perf_counter()
        with self._guard.at(Place.COMPRESSION) as attempt:
            sources = Sources(self._packer.geometry, list(map(self._source, segments)))
            if num_slots < held:
                sources = sources.best(num_slots, self._config.bits, self._config.sink_tokens)
            merge = self._merge(segments[0], sources, num_slots)
            evicted = self.complements.evicted(sources)
            written = self._packer.rewrite(sources, sources.fewest_slots if is_new else num_slots, merge)
        if attempt.failed:
            return 0
        segment, num_freed = segments[0], written.freed.numel()
        self.exchange(nodes, segment, readers, written, sources.end)
        self._tree.free(written.freed)
        segment.is_joined = segment.is_joined or len(segments) > 1
        self.complements.shrunk(segment, segments[1:], self.complements.put(evicted, segment.start, segment.end))
        if is_new:
            is_cut = self._packer.geometry.has_windows and num_slots < held
            segment.splittable = self._compressor.policy.splittable and not is_cut
        totals = self._table.totals
        if len(segments) == 1 and not is_new:
            totals.squeezes += 1
            totals.squeezed_slots += num_freed
            totals.evicted_entries += num_live - segment.num_entries
        else:
            num_merged = 0 if merge is None else merge.indices.numel() - segment.num_entries
            num_new, num_kept = (segment.num_tokens, segment.num_entries) if is_new else (0, 0)
            totals.compressions += 1
            totals.compressed_tokens += num_new
            totals.compression_seconds += time.perf_counter() - begin
            totals.released_slots += num_freed
            totals.kept_entries += num_kept
            totals.merged_entries += num_merged
            totals.evicted_entries += num_new * segment.geometry.num_runs - num_kept - num_merged
        if num_slots == self.slots_at(segment) and not any(map(self._readers.shrinking_prompt, readers)):
            self.at_budget(nodes[-1])
        return num_freed

    @accounting()
    def grow(self, segment: Segment, entries: CopiedEntries, token_slots: Tensor) -> None:
        """Give a packed segment entries back that had been evicted, in token slots ([n], int64) that are empty.

        Rows that it has stay where they are, so readers need not move: they read the new rows, too, from their next
        step on. InvariantError if its entries have no order.
        """
        owner = self._table.packed[segment]
        assert entries.order is not None
        segment.grow(self._packer.extended(segment.storage, entries, token_slots), entries.order)
        self._tree.charge(owner, token_slots.numel())
        self._table.shrinking.discard(owner)  # its next step loses less
        self._table.may_shrink(owner)
        self._table.totals.growths += 1
        self._table.totals.grown_slots += token_slots.numel()
        self._table.totals.returned_entries += sum(count for _, count in entries.sizes)

    @accounting()
    def exchange(
        self,
        nodes: Sequence[Node],
        segment: Segment,
        readers: Sequence[Reader],
        written: Rewritten | None = None,
        end: int = 0,
    ) -> None:
        """Let consecutive nodes hold the spans of one packed segment, charge them, and move their readers.

        Args:
            nodes: root side first; those with spans hold all spans of the segments that this one replaces.
            segment: its rows are written, or being written on the scheduler's stream.
            readers: of the first node, see :meth:`ReaderTable.movable`.
            written: new storage of the segment; None: it is packed already.
            end: logical position after the last token of the new storage.
        """
        before = [len(node.key) if (span := self._spans.at(node)) is None else span.charged_slots for node in nodes]
        full = self._spans.uncompressed(nodes)
        if written is not None:
            segment.pack(written.packed, end, written.kept)
        self._table.hold(nodes, segment)
        for node, slots in zip(nodes, before, strict=True):
            self._tree.charge(node, self._spans[node].charged_slots - slots)
        for node in full:
            self._tree.hold_span(node)
        for reader in readers:  # from their next forward on, they read the packed tokens of their paths from spans
            last = self._tree.locked_by(reader)
            assert last is not None
            self._tree.clear_slots(reader, self._spans.compressed_len(path_to(last)))

    def repack(self, owner: Node, end: int) -> Tensor:
        """Write the entries before ``end`` of a packed segment, whose last span was dropped, into fewer slots.

        Tensor-parallel ranks keep different entries and may need different numbers of slots. They repack the same spans
        at the same time, and all take the largest number. Returns [num_freed], int64, token slots to release.
        """
        segment = self._spans[owner].segment
        # sync: only when a node below another view of its segment is dropped
        sources = Sources(self._packer.geometry, [View(segment, segment.start, end)])
        segment.live_counts, segment.live_end = sources.counts, end
        num_slots = self._tree.largest(sources.fewest_slots, segment.start, end, segment.num_slots)
        if num_slots == segment.num_slots:
            return segment.storage.token_slots[:0]
        written = self._packer.rewrite(sources, num_slots)
        self.exchange(self._spans.views_of(owner), segment, (), written, end)
        return written.freed

    def _source(self, segment: Segment) -> TokenRange | View:
        """What a resize reads of a segment."""
        if segment.packed is not None:
            return segment.live_view
        slots = self._tree.token_slots(self._table.nodes_of(segment))
        keys = None if segment.order is None else segment.order.keys
        return TokenRange(slots, segment.start, keys)

    def _merge(self, segment: Segment, sources: Sources, num_slots: int) -> MergePlan | None:
        """What is merged into the kept entries of a segment that leaves its place."""
        (source, *_), selection = sources.ranges, sources.selection
        if isinstance(source, View) or num_slots == segment.num_slots or selection is None:
            return None
        prompt = segment.prompt or CacheObservation()
        return self._compressor.merge(source.token_slots, source.start, prompt, selection)


def is_launched(segment: Segment) -> bool:
    """Whether its order was launched beside the scheduler's stream."""
    return segment.order is not None and segment.order.turn is not None


def _is_exact(segment: Segment) -> bool:
    """Whether its order is that of exactly its tokens: all were ranked together, and no others with them."""
    order = segment.order
    return order is not None and (order.start, order.end) == (segment.start, segment.end)


def _is_joinable(segment: Segment) -> bool:
    """Whether a packed segment may become one with its neighbour: it is ordered, and no entry is dead."""
    return segment.order is not None and segment.num_live_entries == segment.num_entries
