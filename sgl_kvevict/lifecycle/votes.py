"""Records the attention of requests that extend a prefix, for policies that learn from them."""

from __future__ import annotations

from collections.abc import Sequence

from sgl_kvevict.compression import ReaderObservation
from sgl_kvevict.events.types import Refused
from sgl_kvevict.lifecycle.jobs import ScoringJobs
from sgl_kvevict.lifecycle.nodes import Node, Reader, length_of
from sgl_kvevict.lifecycle.part import Part, Shared
from sgl_kvevict.lifecycle.ranges import Ranges
from sgl_kvevict.policies.signals import Readers
from sgl_kvevict.prefix import Segment

ANSWER_REACH = 15
"""Tokens on each side of an attended one that share its score: a question's answer may stand there."""


class Votes(Part):
    """One observation per prefix, filled by the prefills of its readers, without extra forwards.

    Votes and observations of passes share one limit of memory; the oldest votes make room.
    """

    def __init__(self, shared: Shared, ranges: Ranges, jobs: ScoringJobs) -> None:
        super().__init__(shared)
        self._votes = self._table.votes
        self._ranges = ranges
        self._jobs = jobs

    @property
    def num_bytes(self) -> int:
        """Memory of votes and observations of passes."""
        return self._jobs.num_bytes + sum(vote.num_bytes for vote in self._votes.values())

    def new_observation(
        self, bounds: tuple[int, int], reach: int, segments: Sequence[Segment] = ()
    ) -> ReaderObservation | None:
        """An empty observation, for which the oldest votes make room; None if that is not enough."""
        observation = self._compressor.new_reader_observation(*bounds, reach, segments)
        excess = self.num_bytes + observation.num_bytes - self._config.observation_bytes
        for node, vote in self._votes:
            if excess <= 0:
                break
            self._votes.take(node)
            excess -= vote.num_bytes
            self._table.listener.tell(Refused("no-memory", vote.end - vote.start))
        if excess <= 0:
            return observation
        observation.close()
        self._table.listener.tell(Refused("no-memory", observation.end - observation.start))
        return None

    def observation(self, path: Sequence[Node], start: int) -> ReaderObservation | None:
        """The observation that a request adds to after it matched a path; its queries begin at ``start``.

        None if the policy needs no votes, the prefix is too short, or this is not the request's first chunk.
        """
        asks = self._compressor.policy.readers is Readers.QUESTIONS and self._config.score_after_matches is not None
        if not asks or not path or length_of(path) != start:
            return None
        bounds = self._ranges.bounds(path)
        if bounds is None:
            return None
        vote = self._votes.get(path[-1])
        if vote is None or vote.has_failed or (vote.start, vote.end) != bounds:
            self._votes.take(path[-1])
            vote = self.new_observation(bounds, ANSWER_REACH)
            if vote is not None:
                self._votes.put(path[-1], vote)
        return vote

    def count(self, reader: Reader, first_query: int, path: Sequence[Node]) -> None:
        """Count the vote of a completely prefilled request; compress the prefix if it was the last one needed.

        The prefix is the part of ``path``, the request's prompt, before ``first_query``.
        """
        end = 0
        for i, node in enumerate(path):
            end += len(node.key)
            vote = self._votes.get(node) if end == first_query else None
            if vote is not None:
                vote.end_reader(reader)
                needed = self._config.score_after_matches
                if needed is not None and vote.num_readers >= needed and not vote.has_failed:
                    self._votes.take(node)
                    self._ranges.compress(path[: i + 1], vote.end, vote)
                return
