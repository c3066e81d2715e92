"""Requests that generate: when what they generated is compressed, and what happens to their nodes and slots then."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from sgl_kvevict.compression import Compression, Generated, GeneratedCompressor, GeneratedStep
from sgl_kvevict.guard import Guard, Place, accounting
from sgl_kvevict.lifecycle.listener import CacheListener
from sgl_kvevict.lifecycle.nodes import Node, Reader, length_of, path_to
from sgl_kvevict.lifecycle.ports import TreePort
from sgl_kvevict.lifecycle.ranges import Ranges
from sgl_kvevict.lifecycle.readers import LiveReaders
from sgl_kvevict.lifecycle.spans import SpanTable
from sgl_kvevict.prefix import Segment


class Generations:
    """Compresses what requests generate, block by block, while they do.

    Between two steps a request that has generated ``decode_block`` tokens more than its window (``tail_tokens``) puts
    them into the tree, as it will do with all of them when it ends. There they join the segment of what it generated
    before, which is written anew: entries kept earlier compete with the new ones for the budget. So its slots are in
    the tree's accounting from then on, and retractions, aborts and the end of a turn need nothing of their own.

    As soon as somebody else reads or extends that segment, it stays as it is, and a new one begins behind it. What lies
    before the first generated token, the prompt's tail for instance, is kept whole.

    Args:
        tree: whose nodes.
        spans: what the nodes hold.
        readers: who reads them.
        ranges: compresses prompts.
        compressor: of suffixes.
        decode_block: tokens that are compressed at once.
        tail_tokens: last tokens, which stay uncompressed.
        guard: holds what a policy raises; the request then goes on uncompressed.

    Attributes:
        listener: told of what is compressed.
    """

    def __init__(
        self,
        tree: TreePort,
        spans: SpanTable,
        readers: LiveReaders,
        ranges: Ranges,
        compressor: GeneratedCompressor,
        decode_block: int,
        tail_tokens: int,
        guard: Guard,
    ) -> None:
        self.listener = CacheListener()
        self._tree = tree
        self._spans = spans
        self._readers = readers
        self._ranges = ranges
        self._compressor = compressor
        self._block = decode_block
        self._tail = tail_tokens
        self._guard = guard
        self._suffixes: WeakKeyDictionary[Reader, Generated] = WeakKeyDictionary()

    def __len__(self) -> int:
        return len(self._suffixes)

    @property
    def num_bytes(self) -> int:
        """Memory of recorded queries and of sums."""
        lanes = self._compressor.lanes
        return sum(suffix.num_bytes for suffix in self._suffixes.values()) + (0 if lanes is None else lanes.num_bytes)

    # ---- what happens to requests -----------------------------------------------------------------------------

    def begin(self, reader: Reader, start: int) -> None:
        """The prompt of a request ends at ``start``: the prefill of its last tokens is about to run.

        Nothing happens where the request generates already: in a batch that is mixed with others' prefills its steps
        look like prefills, too.
        """
        if reader not in self._suffixes and not self._readers.is_exact(reader):
            self._suffixes[reader] = self._compressor.new(start)

    def end(self, reader: Reader) -> None:
        """A request let go."""
        suffix = self._suffixes.pop(reader, None)
        if suffix is not None:
            self._compressor.give_up(suffix)

    def clear(self) -> None:
        """The tree is empty, or the model has other weights: what runs goes on uncompressed."""
        for reader in tuple(self._suffixes):
            self.end(reader)

    def step(self, readers: Sequence[Reader], seq_lens: Sequence[int], rows: Sequence[int]) -> GeneratedStep | None:
        """A forward is about to run; requests of it that generate have one new token each.

        Args:
            readers: of the batch.
            seq_lens: their logical lengths, with the new tokens.
            rows: of the batch's queries, each request's last one.

        Returns:
            What the queries of each layer are to be recorded in; None: nothing is.
        """
        if self._compressor.lanes is None:
            return None
        followed = [
            (row, length - 1, self._suffixes[reader])
            for reader, length, row in zip(readers, seq_lens, rows, strict=True)
            if reader in self._suffixes
        ]
        return self._compressor.step(followed, num_rows=rows[-1] + 1)

    def between_steps(self) -> None:
        """Compress what is due."""
        for reader, suffix in tuple(self._suffixes.items()):
            with self._guard.at(Place.COMPRESSION):
                self._visit(reader, suffix)
                continue
            self.end(reader)

    # ---- blocks -----------------------------------------------------------------------------------------------

    def _visit(self, reader: Reader, suffix: Generated) -> None:
        end = self._tree.num_known(reader) - self._tail
        done = max(suffix.compressed_end, suffix.tried)
        is_due = end - done >= self._block and self._compressor.is_followed(suffix)
        if not is_due and not self._compressor.is_full(suffix):
            return
        last = self._tree.locked_by(reader)
        if last is None:
            return
        path = path_to(last)
        if (waterline := self._spans.waterline(path)) > suffix.compressed_end:  # another request generated the same
            suffix.begin(max(waterline, suffix.end))
        elif is_due and self._would_follow(path, suffix):
            self._compress(reader, suffix, end)
        if self._compressor.is_full(suffix):
            self._compressor.count(suffix, self._tree.row(reader, suffix.compressed_end, suffix.end))

    def _would_follow(self, path: Sequence[Node], suffix: Generated) -> bool:
        """Whether all would follow who read the topmost node of a path whose slots would change.

        The path is empty for a prompt so short that nothing of it is cached.
        """
        changing = (node for node in path if node not in self._spans or self._spans[node].segment is suffix.segment)
        first = next(changing, path[-1] if path else None)
        return first is None or self._readers.movable(first) is not None

    def _compress(self, reader: Reader, suffix: Generated, end: int) -> None:
        """Put what a request has generated into the tree, and compress it there."""
        suffix.tried = end
        last = self._tree.keep(reader, end)
        if last is None:
            return
        path = path_to(last)
        if (waterline := self._spans.waterline(path)) > suffix.compressed_end:
            suffix.begin(max(waterline, suffix.end))
        if suffix.segment is not None and not self._is_private(path, suffix.segment):
            suffix.leave_segment()
        end = length_of(path)
        if waterline < suffix.start < end:
            self._ranges.keep_whole(path, suffix.start)
            path = path_to(last)
        num_new = end - suffix.compressed_end
        if num_new <= 0 or self._spans.waterline(path) != suffix.compressed_end:
            return
        nodes = [node for node in path if node not in self._spans or self._spans[node].segment is suffix.segment]
        readers = self._readers.movable(nodes[0])
        if readers is None:
            return
        slots = self._tree.row(reader, suffix.compressed_end, max(end, suffix.end))
        above = None if nodes[0].parent is None else self._spans.get(nodes[0].parent)
        done = self._compressor.compress(suffix, slots, num_new, None if above is None else above.segment)
        self._install(nodes, done, readers)
        self.listener.compressed(nodes, done)

    def _is_private(self, path: Sequence[Node], segment: Segment) -> bool:
        """Whether nobody but the request that locks a path reads a segment, or goes on behind a part of it."""
        nodes = [node for node in path if node in self._spans and self._spans[node].segment is segment]
        return (
            len(nodes) == segment.num_spans
            and segment.num_live_entries == segment.num_entries
            and all(self._tree.num_locks(node) == 1 and len(node.children) <= 1 for node in nodes)
        )

    @accounting()
    def _install(self, nodes: Sequence[Node], done: Compression, readers: Sequence[Reader]) -> None:
        """Consecutive nodes hold the new segment; their readers find it at their next step."""
        before = [self._spans[node].charged_slots if node in self._spans else len(node.key) for node in nodes]
        fresh = [node for node in nodes if node not in self._spans]
        self._spans.grow(nodes, done.segment)
        for node, slots in zip(nodes, before, strict=True):
            self._tree.charge(node, self._spans[node].charged_slots - slots)
        for node in fresh:
            self._tree.hold_span(node)
            self._ranges.discard(node)
        self._tree.free(done.freed)
        self._ranges.move(readers)
