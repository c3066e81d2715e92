"""What the requests that extend a prefix attend to, for policies that ask them."""

from __future__ import annotations

from collections.abc import Sequence

from sgl_kvevict.compression import Compressor, ReaderObservation
from sgl_kvevict.lifecycle.nodes import Node, Reader, length_of
from sgl_kvevict.lifecycle.ranges import Ranges

ANSWER_REACH = 15
"""Tokens on each side of one that a question attends to that share its score: its answer may stand there."""


class Votes:
    """One observation per prefix, which its readers fill while they are prefilled, at no extra forward.

    Args:
        compressor: makes observations; its configuration says how many votes decide.
        ranges: compresses a prefix that enough readers voted on.
    """

    def __init__(self, compressor: Compressor, ranges: Ranges) -> None:
        self._compressor = compressor
        self._ranges = ranges
        self._votes: dict[Node, ReaderObservation] = {}

    def clear(self) -> None:
        """The tree was flushed."""
        self._votes.clear()

    def discard(self, node: Node) -> None:
        """A node was dropped."""
        self._votes.pop(node, None)

    def observation(self, path: Sequence[Node], start: int) -> ReaderObservation | None:
        """What a request that found a path adds to with its queries from ``start`` on.

        Returns:
            None if the policy asks nobody, the prefix is too short, or this is not the request's first chunk.
        """
        if self._compressor.config.score_after_matches is None or not path or length_of(path) != start:
            return None
        bounds = self._ranges.bounds(path)
        if bounds is None:
            return None
        vote = self._votes.get(path[-1])
        if vote is None or vote.has_failed or (vote.start, vote.end) != bounds:
            vote = self._votes[path[-1]] = self._compressor.new_reader_observation(*bounds, ANSWER_REACH)
        return vote

    def count(self, reader: Reader, first_query: int, path: Sequence[Node]) -> None:
        """A reader was seen to its end: if it was the last one needed, the prefix is compressed.

        Args:
            reader: who voted.
            first_query: where the prefix that it found ends.
            path: its prompt.
        """
        end = 0
        for node in path:
            end += len(node.key)
            if end == first_query and node in self._votes:
                vote = self._votes[node]
                vote.end_reader(reader)
                needed = self._compressor.config.score_after_matches
                if needed is not None and vote.num_readers >= needed and not vote.has_failed:
                    del self._votes[node]
                    self._ranges.compress(node, vote.end, vote, reader)
                return
