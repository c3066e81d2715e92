"""Where a prefix is compressed: between two steps, under its readers, who all move along."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from sgl_kvevict.compression import (
    CacheObservation,
    Compression,
    Compressor,
    Observation,
    PendingFit,
    ReaderObservation,
)
from sgl_kvevict.guard import Guard, Place, accounting
from sgl_kvevict.lifecycle.listener import REFUSED_IN_USE, REFUSED_NO_MEMORY, CacheListener
from sgl_kvevict.lifecycle.nodes import Node, Reader, length_of, path_to
from sgl_kvevict.lifecycle.ports import TreePort
from sgl_kvevict.lifecycle.readers import LiveReaders
from sgl_kvevict.lifecycle.spans import SpanTable
from sgl_kvevict.prefix import Segment


@dataclass(frozen=True)
class PendingRange:
    """The uncompressed tokens above a node, and the observation to compress them with.

    Attributes:
        node: last node of the range; it ends at ``end``.
        end: logical position after the range's last token.
        observation: what is known of it.
        share: how much to keep of it; None: what the budget says.
    """

    node: Node
    end: int
    observation: Observation
    share: float | None = None


class Ranges:
    """Ranges that are compressed, and those that wait for it: at most one per node, the newest.

    A range waits while somebody locks it who would not follow: a request that asked to read what is uncompressed.
    The oldest that wait are given up when what was observed of all of them takes too much memory.

    Args:
        tree: whose nodes.
        spans: what the nodes hold.
        readers: who reads them.
        compressor: decides what is kept, and writes it.
        guard: holds what a policy raises; the range then stays uncompressed.

    Attributes:
        listener: told of what is compressed, and of what has to wait.
        on_installed: told which consecutive nodes hold a new segment.
        on_budget: told of the last node of a segment that takes what the budget says, and no step before it.
        on_fit: told of the last node of such a segment, and of its fit, in place of ``on_budget``, which comes after.
    """

    def __init__(
        self, tree: TreePort, spans: SpanTable, readers: LiveReaders, compressor: Compressor, guard: Guard
    ) -> None:
        self.listener = CacheListener()
        self.on_installed: Callable[[Sequence[Node]], None] = lambda nodes: None
        self.on_budget: Callable[[Node], None] = lambda last: None
        self.on_fit: Callable[[Node, PendingFit], None] = lambda last, fit: None
        self._tree = tree
        self._spans = spans
        self._readers = readers
        self._compressor = compressor
        self._guard = guard
        self._pending: dict[Node, PendingRange] = {}
        self._bytes: dict[Node, int] = {}

    def __iter__(self) -> Iterator[PendingRange]:
        """Ranges that wait, oldest first."""
        return iter(tuple(self._pending.values()))

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def num_bytes(self) -> int:
        """Memory that the observations of ranges that wait take."""
        return sum(self._bytes.values())

    def clear(self) -> None:
        """The tree was flushed."""
        self._pending.clear()
        self._bytes.clear()

    def discard(self, node: Node) -> None:
        """Forget the range that ends at a node, if one waits."""
        self._pending.pop(node, None)
        self._bytes.pop(node, None)

    def bounds(self, path: Sequence[Node]) -> tuple[int, int] | None:
        """Logical bounds of what is to be compressed of a path: up to its tail; None if it is too short."""
        start, end = self.waterline(path), self.end_of(path)
        return None if end - start < self._compressor.config.min_prefix_tokens else (start, end)

    def waterline(self, path: Sequence[Node]) -> int:
        """Tokens of a path that are compressed."""
        return self._spans.waterline(path)

    def end_of(self, path: Sequence[Node]) -> int:
        """Logical position of a path's tail, which stays uncompressed."""
        return length_of(path) - self._compressor.config.tail_tokens

    def token_slots(self, path: Sequence[Node], num_tokens: int) -> Tensor:
        """[num_tokens], int64, ordinary slots of the first tokens of a path that are not compressed."""
        return self._tree.token_slots([node for node in path if node not in self._spans])[:num_tokens]

    def compress(self, node: Node, end: int, observation: Observation) -> bool:
        """Compress what is uncompressed of the path to a node, or remember to, once all who read it would follow.

        Args:
            node: the path's last node.
            end: logical position up to which to compress; not beyond the path.
            observation: what to compress with.

        Returns:
            Whether the range is done with (it may also have been too short).
        """
        path = path_to(node)
        num_tokens = end - self._spans.waterline(path)
        if num_tokens < self._compressor.config.min_prefix_tokens:
            return True
        pending = PendingRange(self.node_ending_at(path, end), end, observation)
        if self._try(pending) is not None:
            return True
        self._wait(pending)
        self.listener.refused(REFUSED_IN_USE, num_tokens)
        return False

    def compress_now(self, node: Node, end: int, observation: Observation, share: float | None) -> int | None:
        """Compress what is uncompressed of the path to a node that ends at ``end``; return the token slots won.

        None: somebody would not follow. 0: there was nothing to do, or the policy failed.
        """
        return self._try(PendingRange(node, end, observation, share))

    def keep_whole(self, path: Sequence[Node], end: int) -> bool:
        """Let what is uncompressed of a path, up to ``end``, be read from a span that keeps all of it.

        What comes after can be compressed then: spans come first on every path.

        Returns:
            False: somebody would not follow, or the policy failed.
        """
        last = self.node_ending_at(path, end)
        pending = PendingRange(last, end, CacheObservation(), share=1.0)
        waterline = self._spans.waterline(path)
        return self._write_all(path_to(last), waterline, pending) is not None

    def try_pending(self) -> None:
        """Somebody let go of a path: compress what waited for that, oldest first."""
        for pending in self:
            self._try(pending)

    def node_ending_at(self, path: Sequence[Node], end: int) -> Node:
        """Node of a path that ends at a logical position; the node in which it lies is cut if there is none."""
        position = 0
        for node in path:
            position += len(node.key)
            if position == end:
                return node
            if position > end:
                break
        return self._tree.cut(path, end)

    def _wait(self, pending: PendingRange) -> None:
        self.discard(pending.node)
        if isinstance(pending.observation, ReaderObservation) and pending.observation.products is not None:
            pending.observation.products = None  # its memory would be held for as long as somebody reads exactly
            self._compressor.stats.fits_given_up += 1
        self._pending[pending.node] = pending
        self._bytes[pending.node] = pending.observation.num_bytes
        while self.num_bytes > self._compressor.config.observation_bytes:
            oldest = next(iter(self._pending.values()))
            num_tokens = oldest.end - self._spans.waterline(path_to(oldest.node))
            self.discard(oldest.node)
            self.listener.refused(REFUSED_NO_MEMORY, num_tokens)

    def _try(self, pending: PendingRange) -> int | None:
        """Compress a range unless somebody would not follow; return the slots won, None if it has to wait."""
        path = path_to(pending.node)
        waterline = self._spans.waterline(path)
        if pending.end - waterline < self._compressor.config.min_prefix_tokens:
            self.discard(pending.node)
            return 0
        return self._write_all(path, waterline, pending)

    def _write_all(self, path: Sequence[Node], waterline: int, pending: PendingRange) -> int | None:
        """Write what a path has from the waterline on; see :meth:`_try`."""
        nodes = [node for node in path if node not in self._spans]
        readers = self._readers.movable(nodes[0])
        if readers is None:
            return None
        won = 0
        for group in self._groups(nodes):
            done = self._write(group, waterline, pending)
            if done is None:
                self.discard(pending.node)
                break
            self._install(group, done.segment, done.freed)
            self.listener.compressed(group, done)
            if done.fit is not None:
                self.on_fit(group[-1], done.fit)
            elif pending.share in (None, self._compressor.config.budget):
                self.on_budget(group[-1])
            waterline += done.num_tokens
            won += done.freed.numel()
        self.move(readers)
        return won

    @accounting()
    def adopt(self, nodes: Sequence[Node], segment: Segment, freed: Tensor, readers: Sequence[Reader]) -> None:
        """Let consecutive uncompressed nodes hold a segment that was not made here.

        Args:
            nodes: root side first; they stand for the segment's tokens.
            segment: its rows are written.
            freed: [num_freed], int64, ordinary slots that nodes had.
            readers: who reads the first of them, see :meth:`LiveReaders.movable`.
        """
        self._install(nodes, segment, freed)
        self.move(readers)

    def move(self, readers: Sequence[Reader]) -> None:
        """Readers find what was compressed of their paths in spans from their next forward on."""
        for reader in readers:
            last = self._tree.locked_by(reader)
            assert last is not None
            self._tree.clear_row(reader, self._spans.waterline(path_to(last)))

    def _groups(self, nodes: list[Node]) -> list[list[Node]]:
        """Consecutive nodes of which each group becomes one segment.

        All of them, if segments can be split. Otherwise a group ends where other prompts branch off, or somebody's
        path ends who reads now: they go on reading what comes before.
        """
        if self._compressor.splittable:
            return [nodes]
        groups = [nodes[:1]]
        for above, node in pairwise(nodes):
            if len(above.children) > 1 or self._tree.num_locks(above) != self._tree.num_locks(node):
                groups.append([])
            groups[-1].append(node)
        return groups

    def _write(self, nodes: list[Node], start: int, pending: PendingRange) -> Compression | None:
        """Write what is kept of consecutive nodes into the first of their slots; None if the policy failed."""
        with self._guard.at(Place.COMPRESSION):
            above = None if nodes[0].parent is None else self._spans.get(nodes[0].parent)
            parent = None if above is None else above.segment
            slots = self._tree.token_slots(nodes)
            return self._compressor.compress(slots, start, pending.observation, parent, pending.share)
        return None

    @accounting()
    def _install(self, nodes: Sequence[Node], segment: Segment, freed: Tensor) -> None:
        """Replace the ordinary slots of consecutive nodes by spans of one new segment."""
        self._spans.install(nodes, segment, segment.start)
        for node in nodes:
            self._tree.charge(node, self._spans[node].charged_slots - len(node.key))
            self._tree.hold_span(node)
            self.discard(node)
        self._tree.free(freed)
        self.on_installed(nodes)
