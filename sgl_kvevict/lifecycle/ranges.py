"""Compresses ranges of uncompressed tokens between two steps, while requests read them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import pairwise

from torch import Tensor

from sgl_kvevict.compression import CacheObservation, Compression, Observation, ReaderObservation
from sgl_kvevict.guard import Place, accounting
from sgl_kvevict.lifecycle.listener import REFUSED_IN_USE, REFUSED_NO_MEMORY
from sgl_kvevict.lifecycle.nodes import Node, Reader, length_of, path_to
from sgl_kvevict.lifecycle.part import Part, Shared
from sgl_kvevict.lifecycle.saving import Saving
from sgl_kvevict.lifecycle.table import Pending, SegmentFit
from sgl_kvevict.prefix import Segment


class Verdict(Enum):
    """Result of an attempt to compress a range."""

    COMPRESSED = auto()
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

    The oldest pending ranges are given up when their observations exceed ``observation_bytes``.
    """

    def __init__(self, shared: Shared, saving: Saving | None) -> None:
        super().__init__(shared)
        self._saving = saving

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

    def compress(self, node: Node, end: int, observation: Observation) -> Attempted:
        """Compress the uncompressed tokens of the path to ``node`` up to ``end``; a range in use becomes pending."""
        path = path_to(node)
        num_tokens = end - self._spans.waterline(path)
        if not self.is_long_enough(num_tokens):
            return Attempted(Verdict.TOO_SHORT)
        last = self.node_ending_at(path, end)
        done = self.compress_now(last, Pending(end, observation))
        if done.verdict is Verdict.IN_USE:
            self._wait(last, Pending(end, observation))
            self._table.listener.refused(REFUSED_IN_USE, num_tokens)
        return done

    def compress_now(self, node: Node, pending: Pending) -> Attempted:
        """Compress the uncompressed tokens of the path to ``node``, which ends at ``pending.end``, if not in use."""
        path = path_to(node)
        if not self.is_long_enough(pending.end - self._spans.waterline(path)):
            self._table.pending.take(node)
            return Attempted(Verdict.TOO_SHORT)
        return self._write_all(path, pending)

    def keep_whole(self, path: Sequence[Node], end: int) -> None:
        """Put the uncompressed tokens of a path up to ``end`` into a span that keeps all entries, if possible.

        Tokens after them can then be compressed: spans come first on every path.
        """
        last = self.node_ending_at(path, end)
        self._write_all(path_to(last), Pending(end, CacheObservation(), share=1.0))

    def join(self, path: Sequence[Node]) -> None:
        """Write the last segments of a path as one, so that their entries compete for its slots.

        Not those that passes read or have measured, fitted ones, those with a part elsewhere, and nothing before them;
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
            joined, freed = self._packer.join(segments)
            self.install(nodes, joined, freed, readers)
            num_tokens, seconds = joined.end - joined.start, time.perf_counter() - begin
            done = Compression(joined, freed, joined.start, num_tokens, 0, seconds, replaced=joined)
            self._table.listener.compressed(nodes, done)

    def try_pending(self) -> None:
        """Compress pending ranges, oldest first, after a request was released."""
        for node, pending in self._table.pending:
            self.compress_now(node, pending)

    def node_ending_at(self, path: Sequence[Node], end: int) -> Node:
        """Node of a path that ends at position ``end``; a node that contains ``end`` is split."""
        position = 0
        for node in path:
            position += len(node.key)
            if position == end:
                return node
            if position > end:
                break
        return self._tree.cut(path, end)

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
        observation = pending.observation
        if isinstance(observation, ReaderObservation) and observation.products is not None:
            observation.products = None  # their memory would be held as long as a request reads exactly
            self._compressor.stats.fits_given_up += 1
        self._table.pending.put(node, pending, observation.num_bytes)
        while self._table.pending.num_bytes > self._config.observation_bytes:
            oldest = self._table.pending.oldest()
            assert oldest is not None
            num_tokens = oldest[1].end - self._spans.waterline(path_to(oldest[0]))
            self._table.pending.take(oldest[0])
            self._table.listener.refused(REFUSED_NO_MEMORY, num_tokens)

    def _write_all(self, path: Sequence[Node], pending: Pending) -> Attempted:
        """Compress the uncompressed tokens of a path, however few."""
        nodes = self._spans.uncompressed(path)
        readers = self._readers.movable(nodes[0])
        if readers is None:
            return Attempted(Verdict.IN_USE)
        won = 0
        start = self._spans.waterline(path)
        for group in self._groups(nodes):
            done = self._write(group, start, pending)
            if done is None:
                self._table.pending.take(path[-1])
                return Attempted(Verdict.FAILED, won)
            self.install(group, done.segment, done.freed, readers)
            self._table.listener.compressed(group, done)
            if done.fit is not None:
                self._table.fits.put(group[-1], SegmentFit(done.fit, done.segment.num_slots))
            elif pending.share in (None, self._config.budget):
                self.at_budget(group[-1])
            start += done.num_tokens
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

    def _write(self, nodes: list[Node], start: int, pending: Pending) -> Compression | None:
        """Write the kept entries of consecutive nodes into the first of their slots; None if the policy failed."""
        done = None
        with self._guard.at(Place.COMPRESSION):
            above = self._spans.at(nodes[0].parent)
            parent = None if above is None else above.segment
            slots = self._tree.token_slots(nodes)
            done = self._compressor.compress(slots, start, pending.observation, parent, pending.share)
        return done


def _is_joinable(segment: Segment) -> bool:
    return (
        segment.worth is not None
        and not (segment.is_measured or segment.is_fitted or segment.is_generated)
        and segment.entry_attention is None
        and segment.num_live_entries == segment.num_entries
    )
