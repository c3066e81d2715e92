"""Compresses generated tokens block by block, and exchanges their nodes and slots."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from sgl_kvevict.cache.nodes import Node, Reader, length_of, path_to
from sgl_kvevict.cache.ports import TreePort
from sgl_kvevict.cache.readers import ReaderTable
from sgl_kvevict.cache.records import PrefixTable
from sgl_kvevict.cache.resize import Resizer
from sgl_kvevict.guard import Guard, Place
from sgl_kvevict.segments import Compressor, Generated, GeneratedCompressor, GeneratedStep, Segment


class NoGenerations:
    """Without ``decode_block`` generated tokens stay as they are: nothing is done."""

    @property
    def num_bytes(self) -> int:
        """Memory of recorded queries and attention sums."""
        return 0

    def begin(self, reader: Reader, start: int) -> None:
        """A request is about to generate; its prompt ends at ``start``."""

    def end(self, reader: Reader) -> None:
        """A request was released."""

    def clear(self) -> None:
        """The tree is empty, or the weights have changed."""

    def step(
        self, readers: Sequence[Reader], seq_lens: Sequence[int], extend_lens: Sequence[int] | None
    ) -> GeneratedStep | None:
        """A forward is about to run in which requests generate."""
        return None

    def between_steps(self) -> None:
        """The scheduler is between two steps."""


class Generations(NoGenerations):
    """Compresses generated tokens of requests, block by block.

    Between two steps a request that has generated ``decode_block`` tokens beyond its window (``tail_tokens``) inserts
    them into the tree, as at its end. They join the segment of its earlier generated tokens, which is written anew: old
    and new entries compete for the budget. Their slots are then in the tree's accounting, so retraction, abort and the
    end of a request need no handling of their own. After an error a request goes on uncompressed.

    Once another request reads or extends that segment, it stays as it is, and a new one begins after it. Tokens before
    the first generated one, such as the prompt's tail, are kept whole.
    """

    def __init__(
        self,
        tree: TreePort,
        table: PrefixTable,
        readers: ReaderTable,
        compressor: Compressor,
        guard: Guard,
        resizer: Resizer,
        decode_block: int,
    ) -> None:
        self._tree = tree
        self._table = table
        self._spans = table.spans
        self._readers = readers
        self._guard = guard
        self._resizer = resizer
        self._suffix_compressor = GeneratedCompressor(compressor)
        self._block = decode_block
        self._tail = compressor.config.tail_tokens

    @property
    def num_bytes(self) -> int:
        """Memory of recorded queries and attention sums."""
        lanes = self._suffix_compressor.lanes
        return sum(suffix.num_bytes for _, suffix in self._suffixes()) + (0 if lanes is None else lanes.num_bytes)

    # ---- events of requests -----------------------------------------------------------------------------------

    def begin(self, reader: Reader, start: int) -> None:
        """Begin to follow a request whose prompt ends at ``start``, before the prefill of its last tokens.

        No effect on a request that already generates: in a batch mixed with prefills its steps look like prefills.
        """
        record = self._readers[reader]
        if record.suffix is None and not record.is_exact:
            record.suffix = self._suffix_compressor.new(start)

    def end(self, reader: Reader) -> None:
        """Stop following a released request."""
        record = self._readers[reader]
        if record.suffix is not None:
            self._suffix_compressor.give_up(record.suffix)
            record.suffix = None

    def clear(self) -> None:
        """Let running requests go on uncompressed: the tree is empty, or the weights have changed."""
        for reader, _ in self._suffixes():
            self.end(reader)

    def step(
        self, readers: Sequence[Reader], seq_lens: Sequence[int], extend_lens: Sequence[int] | None
    ) -> GeneratedStep | None:
        """Prepare a forward in which followed requests have one new token each; return the recorder of their queries.

        ``seq_lens`` are logical lengths with the new tokens; ``extend_lens``: new tokens of each request, None: one.
        """
        if self._suffix_compressor.lanes is None:
            return None
        step = None
        with self._guard.at(Place.OBSERVATION) as attempt:
            step = self._step(readers, seq_lens, [end - 1 for end in accumulate(extend_lens or [1] * len(seq_lens))])
        if attempt.failed:
            self.clear()
        return step

    def _step(self, readers: Sequence[Reader], seq_lens: Sequence[int], rows: Sequence[int]) -> GeneratedStep | None:
        """``rows``: each request's last row in the batch's queries."""
        followed = [
            (row, length - 1, suffix)
            for reader, length, row in zip(readers, seq_lens, rows, strict=True)
            if (suffix := self._readers[reader].suffix) is not None
        ]
        return self._suffix_compressor.step(followed, num_rows=rows[-1] + 1)

    def between_steps(self) -> None:
        """Compress the blocks that are due."""
        for reader, suffix in self._suffixes():
            with self._guard.at(Place.COMPRESSION) as attempt:
                self._visit(reader, suffix)
            if attempt.failed:
                self.end(reader)

    def _suffixes(self) -> list[tuple[Reader, Generated]]:
        return [(reader, each.suffix) for reader, each in self._readers.items() if each.suffix is not None]

    # ---- blocks -----------------------------------------------------------------------------------------------

    def _visit(self, reader: Reader, suffix: Generated) -> None:
        """Compress a request's block if it is due, and sum the attention of its queries before its lane is full."""
        end = self._tree.num_known(reader) - self._tail
        done = max(suffix.compressed_end, suffix.tried)
        is_due = end - done >= self._block and self._suffix_compressor.is_followed(suffix)
        if not is_due and not self._suffix_compressor.is_full(suffix):
            return
        last = self._tree.locked_by(reader)
        if last is None:
            return
        path = path_to(last)
        compressed_len = self._spans.compressed_len(path)
        if compressed_len > suffix.compressed_end:  # another request generated the same
            suffix.begin(max(compressed_len, suffix.end))
        elif is_due and self._is_movable(path, suffix) and not self._resizer.is_ranking(path):
            self._compress(reader, suffix, end)
        if self._suffix_compressor.is_full(suffix):
            self._suffix_compressor.count(suffix, self._tree.slots_of(reader, suffix.compressed_end, suffix.end))

    def _is_movable(self, path: Sequence[Node], suffix: Generated) -> bool:
        """Whether all readers of the topmost node whose slots would change are movable.

        The path is empty if the prompt is too short to be cached.
        """
        changing = (node for node in path if node not in self._spans or self._spans[node].segment is suffix.segment)
        first = next(changing, path[-1] if path else None)
        return first is None or self._readers.movable(first) is not None

    def _compress(self, reader: Reader, suffix: Generated, end: int) -> None:
        """Put a request's tokens before ``end`` into the tree, and write the new ones of them into its segment."""
        suffix.tried = end
        last = self._tree.keep(reader, end)
        if last is None:
            return
        path = path_to(last)
        if (compressed_len := self._spans.compressed_len(path)) > suffix.compressed_end:
            suffix.begin(max(compressed_len, suffix.end))
        if suffix.segment is not None and not self._is_private(path, suffix.segment):
            suffix.leave_segment()
        end = length_of(path)
        if compressed_len < suffix.start < end:
            self._resizer.shrink_now(self._resizer.range_to(path, suffix.start), share=1.0)
            path = path_to(last)
        num_new = end - suffix.compressed_end
        if num_new <= 0 or self._spans.compressed_len(path) != suffix.compressed_end:
            return
        first = next(node for node in path if node not in self._spans or self._spans[node].segment is suffix.segment)
        if self._readers.movable(first) is None:
            return
        segments = [self._table.join(self._resizer.range_to(path, end))]
        if suffix.segment is not None:
            segments.insert(0, suffix.segment)
        slots = self._tree.slots_of(reader, suffix.compressed_end, max(end, suffix.end))
        above = self._spans.at(first.parent)
        block = self._suffix_compressor.choose(suffix, slots, num_new, None if above is None else above.segment)
        self._resizer.resize(segments, sum(segment.num_slots for segment in segments), block=block)
        if segments[0].packed is None or segments[0].end < end:  # an error was held
            self.end(reader)
            return
        self._suffix_compressor.written(suffix, block, segments[0])

    def _is_private(self, path: Sequence[Node], segment: Segment) -> bool:
        """Whether only the request that locks a path reads a segment, and no other prompt branches off inside it."""
        nodes = [node for node in path if node in self._spans and self._spans[node].segment is segment]
        return (
            len(nodes) == segment.num_spans
            and segment.num_live_entries == segment.num_entries
            and all(self._tree.num_locks(node) == 1 and len(node.children) <= 1 for node in nodes)
        )
