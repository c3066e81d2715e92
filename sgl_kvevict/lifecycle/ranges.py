"""Compresses ranges of uncompressed tokens between two steps, while requests read them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import partial
from itertools import accumulate, pairwise, zip_longest

from torch import Tensor

from sgl_kvevict.compression import CacheObservation, Chosen, Compression, Observation, state_of
from sgl_kvevict.errors import InvariantError
from sgl_kvevict.events.types import Refused
from sgl_kvevict.guard import Place, accounting
from sgl_kvevict.lifecycle.nodes import Node, Reader, length_of, path_to
from sgl_kvevict.lifecycle.part import Part, Shared
from sgl_kvevict.lifecycle.pending import Choice, Pending, RangeEvent, RangeFact, RangeStep, next_step
from sgl_kvevict.lifecycle.saving import Saving
from sgl_kvevict.prefix import Segment, Sources, View

TURNS_OF_CHOICE = 2
"""Turns of the scheduler's loop from launching a choice to its exchange: a step at least is launched between. Counted,
because tensor-parallel ranks would not agree on whether a stream is done."""


class Verdict(Enum):
    """Result of an attempt to compress a range."""

    COMPRESSED = auto()
    CHOOSING = auto()
    """Its entries are being chosen beside the next step; it is compressed after it, unless it changes."""
    TOO_SHORT = auto()
    """It has fewer than ``min_prefix_tokens`` uncompressed tokens."""
    IN_USE = auto()
    """A reader is not movable (:meth:`ReaderTable.movable`); the range is unchanged."""
    FAILED = auto()
    """The policy raised an exception; at least the end of the range is uncompressed."""


@dataclass(frozen=True)
class Attempted:
    """A verdict and the number of token slots released."""

    verdict: Verdict
    num_slots: int = 0


class Ranges(Part):
    """Compresses ranges; a range with an exact reader becomes pending, the newest one per node.

    Where entries are chosen on a stream of their own, every range is pending for :data:`TURNS_OF_CHOICE`, unless its
    slots are wanted before. It is given up, or chosen anew, as :data:`~sgl_kvevict.lifecycle.pending.RULES` say.

    The oldest pending ranges are given up when their observations exceed ``observation_bytes``.
    """

    def __init__(self, shared: Shared, saving: Saving | None) -> None:
        super().__init__(shared)
        self._saving = saving
        self._turn = 0

    def is_long_enough(self, num_tokens: int) -> bool:
        """Whether a range reaches ``min_prefix_tokens``."""
        return num_tokens >= self._config.min_prefix_tokens

    def bounds(self, path: Sequence[Node]) -> tuple[int, int] | None:
        """Logical bounds of a path's uncompressed tokens before its tail; None if they are too few."""
        start, end = self._spans.waterline(path), self.end_of(path)
        return (start, end) if self.is_long_enough(end - start) else None

    def end_of(self, path: Sequence[Node]) -> int:
        """Logical position of a path's tail, which stays uncompressed."""
        return length_of(path) - self._config.tail_tokens

    def token_slots(self, path: Sequence[Node], num_tokens: int) -> Tensor:
        """[num_tokens], int64, ordinary slots of the first uncompressed tokens of a path."""
        return self._tree.token_slots(self._spans.uncompressed(path))[:num_tokens]

    def compress(self, path: Sequence[Node], end: int, observation: Observation) -> Attempted:
        """Compress the uncompressed tokens of a path up to ``end``; a range in use becomes pending."""
        if not self.is_long_enough(end - self._spans.waterline(path)):
            return Attempted(Verdict.TOO_SHORT)
        last, pending = self.node_ending_at(path, end), Pending(end, observation)
        path = path_to(last)
        if self.is_choosing(path):
            known = self._table.pending.get(last)
            if known is None or known.choice is None:
                self._table.pending.put(last, pending, observation.num_bytes)
            return Attempted(Verdict.CHOOSING)
        done = self._begin(path, pending)
        if done.verdict is Verdict.IN_USE:
            self._wait(last, pending)
        return done

    def keep_whole(self, path: Sequence[Node], end: int) -> None:
        """Put the uncompressed tokens of a path up to ``end`` into a span that keeps all entries, if possible.

        Tokens after them can then be compressed: spans come first on every path.
        """
        last = self.node_ending_at(path, end)
        self.compress_now(path_to(last), Pending(end, CacheObservation(), share=1.0))

    def join(self, path: Sequence[Node]) -> None:
        """Write the last segments of a path as one, so that their entries compete for its slots.

        Not those that passes read or have measured, those with a part elsewhere, and nothing before them;
        nor while a reader is not movable.
        """
        segments: list[Segment] = []
        start = self._spans.waterline(path)
        for owner in reversed(self._spans.owners(path)):
            segment = self._spans[owner].segment
            if segment.end != start or not _is_joinable(segment):
                break
            segments.insert(0, segment)
            start = segment.start
        if len(segments) < 2:
            return
        nodes = [node for node in path if node in self._spans and self._spans[node].start >= start]
        readers = self._readers.movable(nodes[0])
        if readers is None or self._table.is_being_scored(nodes[-1]):
            return
        with self._guard.at(Place.COMPRESSION):
            begin = time.perf_counter()
            views = [View(segment, segment.start, segment.end) for segment in segments]
            num_slots = sum(segment.num_slots for segment in segments)  # all: ranks do not fill them alike
            joined, freed = self._packer.rewrite(Sources(self._packer.geometry, views), num_slots, bits=16)
            joined.is_joined = True
            self.install(nodes, joined, freed, readers)
            done = Compression(joined, freed, 0, time.perf_counter() - begin, replaced=joined)
            self._table.listener.compressed(nodes, done)

    def try_pending(self) -> None:
        """Compress pending ranges, oldest first, after a request was released."""
        for node, pending in self._table.pending:
            self._react(node, pending, RangeEvent.RELEASED)

    def between_steps(self) -> None:
        """Exchange the ranges whose entries were chosen beside the last step."""
        self._turn += 1
        self._end_choices(RangeEvent.TURN)

    def exchange_all(self) -> int:
        """Exchange all ranges whose entries are being chosen, and can be exchanged; return the token slots released.

        Slots are short, so the scheduler's stream, not the host, waits for the choices.
        """
        return self._end_choices(RangeEvent.SHORT)

    def is_choosing(self, path: Sequence[Node]) -> bool:
        """Whether entries of a path's uncompressed tokens are being chosen."""
        if self._compressor.stream is None:
            return False
        first = next((node for node in path if node not in self._spans), None)
        choosing = [node for node, pending in self._table.pending if pending.choice is not None]
        return any(first in path_to(node) for node in choosing)

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

    def at_budget(self, last: Node) -> None:
        """A segment has reached the budget; ``last`` is the last node with a span of it."""
        if self._saving is not None:
            self._saving.at_budget(last)

    @accounting()
    def install(self, nodes: Sequence[Node], segment: Segment, freed: Tensor, readers: Sequence[Reader]) -> None:
        """Replace the slots of consecutive nodes by spans of one new segment, and move their readers.

        Args:
            nodes: root side first; those with spans hold all spans of the segments that the new one replaces.
            segment: its rows are written, or being written on the scheduler's stream.
            freed: [num_freed], int64, token slots to release.
            readers: of the first node, see :meth:`ReaderTable.movable`.
        """
        before = [len(node.key) if (span := self._spans.at(node)) is None else span.charged_slots for node in nodes]
        full = self._spans.uncompressed(nodes)
        self._table.install(nodes, segment)
        for node, slots in zip(nodes, before, strict=True):
            self._tree.charge(node, self._spans[node].charged_slots - slots)
        for node in full:
            self._tree.hold_span(node)
        self._tree.free(freed)
        self.move(readers)

    def move(self, readers: Sequence[Reader]) -> None:
        """From their next forward on, readers read the compressed tokens of their paths from spans."""
        for reader in readers:
            last = self._tree.locked_by(reader)
            assert last is not None
            self._tree.clear_row(reader, self._spans.waterline(path_to(last)))

    def _wait(self, node: Node, pending: Pending) -> None:
        self._table.pending.put(node, pending, pending.observation.num_bytes)
        while self._table.pending.num_bytes > self._config.observation_bytes:
            oldest = self._table.pending.oldest()
            assert oldest is not None
            num_tokens = oldest[1].end - self._spans.waterline(path_to(oldest[0]))
            self._table.pending.take(oldest[0])
            self._table.listener.tell(Refused("no-memory", num_tokens))
        self._table.listener.tell(Refused("in-use", pending.end - self._spans.waterline(path_to(node))))

    def _end_choices(self, event: RangeEvent) -> int:
        choosing = [(node, pending) for node, pending in self._table.pending if pending.choice is not None]
        won = sum(self._react(node, pending, event).num_slots for node, pending in choosing)
        if choosing:
            self.try_pending()  # those that begin at the same tokens
        return won

    def _react(self, node: Node, pending: Pending, event: RangeEvent) -> Attempted:
        """Take the step that an event asks for; none if the range was dealt with meanwhile."""
        if self._table.pending.get(node) is not pending:
            return Attempted(Verdict.TOO_SHORT)
        step = next_step(pending.stage, event, self._facts(node, pending))
        if step in (RangeStep.FORGET, RangeStep.CHOOSE):
            self._table.pending.take(node)
        if step is RangeStep.CHOOSE:
            return self._begin(path_to(node), replace(pending, choice=None))
        if step is RangeStep.EXCHANGE:
            return self.compress_now(path_to(node), pending)
        if step is RangeStep.WAIT:
            self._wait(node, replace(pending, choice=None))
        return Attempted(Verdict.TOO_SHORT if step is RangeStep.FORGET else Verdict.IN_USE)

    def _facts(self, node: Node, pending: Pending) -> set[RangeFact]:
        path, choice = path_to(node), pending.choice
        nodes, start = self._spans.uncompressed(path), self._spans.waterline(path)
        holds = {
            RangeFact.TOO_SHORT: not self.is_long_enough(pending.end - start),
            RangeFact.FIXED: self._readers.movable(nodes[0]) is None,
        }
        if choice is None:
            holds[RangeFact.BUSY] = self.is_choosing(path)
        else:
            ends = {end for end in _ends(self._groups(nodes), start) if end < choice.ends[-1]}
            holds[RangeFact.EARLY] = self._turn < choice.turn + TURNS_OF_CHOICE
            holds[RangeFact.CHANGED] = start != choice.start or not ends <= set(choice.ends)
        return {fact for fact, is_true in holds.items() if is_true}

    def _begin(self, path: Sequence[Node], pending: Pending) -> Attempted:
        """Launch the choice of a range's entries; where nothing would run beside, compress it."""
        if self._compressor.stream is None:
            return self.compress_now(path, pending)
        nodes, start = self._spans.uncompressed(path), self._spans.waterline(path)
        if self._readers.movable(nodes[0]) is None:
            return Attempted(Verdict.IN_USE)
        groups = self._groups(nodes)
        results = self._choose(groups, start, pending)
        if not results:
            return Attempted(Verdict.FAILED)
        ends = _ends(groups, start)[: len(results)]
        choice = Choice(start, tuple(ends), tuple(results), self._turn)
        self._table.pending.put(path[-1], replace(pending, choice=choice), pending.observation.num_bytes)
        return Attempted(Verdict.CHOOSING)

    def compress_now(self, path: Sequence[Node], pending: Pending) -> Attempted:
        """Compress the uncompressed tokens of a path, however few, up to its end (``pending.end``), if not in use."""
        nodes = self._spans.uncompressed(path)
        readers = self._readers.movable(nodes[0])
        if readers is None:
            return Attempted(Verdict.IN_USE)
        start, choice, won = self._spans.waterline(path), pending.choice, 0
        if choice is None:
            groups = self._groups(nodes)
            results = self._choose(groups, start, pending)
        else:
            groups, results = _grouped(nodes, start, choice.ends), list(choice.results)
        for group, result in zip_longest(groups, results):
            done = None if result is None else self._write(group, result)
            if done is None:
                self._table.pending.take(path[-1])
                return Attempted(Verdict.FAILED, won)
            self.install(group, done.segment, done.freed, readers)
            self._table.listener.compressed(group, done)
            if pending.share in (None, self._config.budget):
                self.at_budget(group[-1])
            won += done.freed.numel()
        return Attempted(Verdict.COMPRESSED, won)

    def _groups(self, nodes: list[Node]) -> list[list[Node]]:
        """Divide consecutive nodes into groups, each of which becomes one segment.

        One group if segments can be split.
        """
        groups = [nodes[:1]]
        for above, node in pairwise(nodes):
            if self.begins_segment(above, node):
                groups.append([])
            groups[-1].append(node)
        return groups

    def _choose(self, groups: list[list[Node]], start: int, pending: Pending) -> list[Callable[[], Chosen]]:
        """Launch the choice of the kept entries of each segment; fewer if the policy failed."""
        above = self._spans.at(groups[0][0].parent)
        state = state_of(None if above is None else above.segment)
        results: list[Callable[[], Chosen]] = []
        for nodes in groups:
            with self._guard.at(Place.COMPRESSION) as attempt:
                slots = self._tree.token_slots(nodes)
                results.append(self._compressor.choose(slots, start, pending.observation, state, pending.share))
                state = partial(_state_after, results[-1])
                start += slots.numel()
            if attempt.failed:
                break
        return results

    def _write(self, nodes: list[Node], result: Callable[[], Chosen]) -> Compression | None:
        """Write the kept entries of consecutive nodes into the first of their slots; None if the policy failed."""
        done = None
        with self._guard.at(Place.COMPRESSION):
            done = self._compressor.write(result(), self._tree.token_slots(nodes))
        return done


def _ends(groups: Sequence[Sequence[Node]], start: int) -> list[int]:
    """Logical positions after the last token of each group of consecutive nodes."""
    sizes = (sum(len(node.key) for node in nodes) for nodes in groups)
    return list(accumulate(sizes, initial=start))[1:]


def _grouped(nodes: Sequence[Node], start: int, ends: Sequence[int]) -> list[list[Node]]:
    """Divide consecutive nodes where a group is to end; those after the last end are the last group."""
    groups: list[list[Node]] = [[]]
    for node in nodes:
        if start in ends:
            groups.append([])
        groups[-1].append(node)
        start += len(node.key)
    return groups


def _state_after(result: Callable[[], Chosen]) -> object:
    return result().decision.state


def _is_joinable(segment: Segment) -> bool:
    return (
        segment.order is not None
        and not (segment.is_measured or segment.is_generated)
        and segment.entry_attention is None
        and segment.num_live_entries == segment.num_entries
    )
