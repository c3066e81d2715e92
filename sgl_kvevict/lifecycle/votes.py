"""What the requests that extend a prefix attend to, for policies that ask them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from sgl_kvevict.compression import Compressor, ReaderObservation
from sgl_kvevict.lifecycle.fitting import Fits
from sgl_kvevict.lifecycle.jobs import ScoringJobs
from sgl_kvevict.lifecycle.listener import REFUSED_NO_MEMORY, CacheListener
from sgl_kvevict.lifecycle.nodes import Node, Reader, length_of
from sgl_kvevict.lifecycle.ranges import Ranges
from sgl_kvevict.policies.signals import Readers
from sgl_kvevict.prefix import Segment

ANSWER_REACH = 15
"""Tokens on each side of one that a question attends to that share its score: its answer may stand there."""


class Votes:
    """One observation per prefix, which its readers fill while they are prefilled, at no extra forward.

    Votes, what passes see and fits share one limit of memory; the oldest votes make room. A prefix for whose fit there
    is none is only selected.

    Args:
        compressor: makes observations; its configuration says how many votes decide, and how much they may take.
        ranges: compresses a prefix that enough readers voted on.
        jobs: whose observations count for the limit.
        fits: which count too.

    Attributes:
        listener: told of what had no room.
    """

    def __init__(self, compressor: Compressor, ranges: Ranges, jobs: ScoringJobs, fits: Fits) -> None:
        self.listener = CacheListener()
        self._compressor = compressor
        self._config = compressor.config
        self._ranges = ranges
        self._jobs = jobs
        self._fits = fits
        self._votes: OrderedDict[Node, ReaderObservation] = OrderedDict()

    @property
    def num_bytes(self) -> int:
        """Memory that votes, what passes have seen, and fits take."""
        return self._jobs.num_bytes + self._fits.num_bytes + sum(vote.num_bytes for vote in self._votes.values())

    def new_observation(
        self, bounds: tuple[int, int], reach: int, segments: Sequence[Segment] = ()
    ) -> ReaderObservation | None:
        """An empty observation, for which the oldest votes make room; None if there is none."""
        observation = self._compressor.new_reader_observation(*bounds, reach, segments)
        excess = self.num_bytes + observation.num_bytes - self._config.observation_bytes
        while excess > 0 and self._votes:
            _, vote = self._votes.popitem(last=False)
            excess -= vote.num_bytes
            self.listener.refused(REFUSED_NO_MEMORY, vote.end - vote.start)
        if excess > 0 and observation.products is not None:
            excess -= observation.products.num_bytes
            observation.products = None
            self._compressor.stats.fits_given_up += 1
        if excess <= 0:
            return observation
        observation.close()
        self.listener.refused(REFUSED_NO_MEMORY, observation.end - observation.start)
        return None

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
        asks = self._compressor.policy.readers is Readers.QUESTIONS and self._config.score_after_matches is not None
        if not asks or not path or length_of(path) != start:
            return None
        bounds = self._ranges.bounds(path)
        if bounds is None:
            return None
        vote = self._votes.get(path[-1])
        if vote is None or vote.has_failed or (vote.start, vote.end) != bounds:
            self._votes.pop(path[-1], None)
            vote = self.new_observation(bounds, ANSWER_REACH)
            if vote is not None:
                self._votes[path[-1]] = vote
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
                needed = self._config.score_after_matches
                if needed is not None and vote.num_readers >= needed and not vote.has_failed:
                    del self._votes[node]
                    self._ranges.compress(node, vote.end, vote)
                return
