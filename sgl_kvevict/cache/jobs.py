"""The order of scoring jobs, and the outcomes reported under their tickets."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from sgl_kvevict.cache.job import Outcome, ScoringJob
from sgl_kvevict.cache.nodes import NamespaceKey, namespace_of
from sgl_kvevict.cache.records import PrefixTable

MAX_REMEMBERED = 256
"""Outcomes kept for tickets."""
MAX_JOBS = 1024
"""Prefixes that may wait for passes; further requests are answered "busy"."""

MAX_BEGUN_JOBS = 4
"""Jobs that have begun, and so hold memory; others begin when one of them ends."""


class ScoringJobs:
    """Jobs in order of arrival, at most one per node; round-robin over namespaces.

    ``outcomes``: by ticket, newest last, at most ``MAX_REMEMBERED``.
    """

    def __init__(self, table: PrefixTable) -> None:
        self.outcomes: OrderedDict[str, str] = OrderedDict()
        self._table = table
        self._queue = table.jobs
        self._turns: dict[NamespaceKey, int] = {}
        self._num_turns = 0

    def __len__(self) -> int:
        return len(self._queue)

    def next(self) -> ScoringJob | None:
        """The oldest job of the namespace with the least recent turn; None: there is no job."""
        begun = self._table.begun_jobs
        candidates = begun if len(begun) >= MAX_BEGUN_JOBS else self._queue.values()
        turn_of = self._turns.get
        return min(candidates, key=lambda job: turn_of(namespace_of(job.node), 0), default=None)

    @property
    def num_bytes(self) -> int:
        """Memory of passes' observations, and of prompts kept with them."""
        kept = (part for job in self._queue.values() for part in (job.observation, job.prompt) if part is not None)
        return sum(part.num_bytes for part in kept)

    def take_turn(self, job: ScoringJob) -> None:
        """Note that a job has its namespace's turn."""
        self._num_turns += 1
        self._turns[namespace_of(job.node)] = self._num_turns

    def add(self, job: ScoringJob) -> None:
        """Queue a job, or merge it into the queued job of the same prefix; the newest request's questions count."""
        queued = self._queue.get(job.node)
        if queued is None and len(self) < MAX_JOBS:
            self._queue.put(job.node, job)
        elif queued is None or len(queued.tickets) + len(job.tickets) > MAX_REMEMBERED:
            self.tell(job.tickets, Outcome.BUSY)
            return
        else:
            queued.tickets |= job.tickets
            if job.is_wanted and queued.observation is None:
                queued.questions, queued.is_wanted = job.questions, True
        self.tell(job.tickets, Outcome.QUEUED)

    def end(self, job: ScoringJob, outcome: Outcome) -> None:
        """Remove a job and report its outcome."""
        self.tell(job.tickets, outcome)
        if self._queue.get(job.node) is not job:
            return
        self._queue.take(job.node)
        if job.observation is not None:
            self._table.unobserve(job.observation)
        waiting = {namespace_of(node) for node, _ in self._queue}
        self._turns = {name: turn for name, turn in self._turns.items() if name in waiting}

    def tell(self, tickets: Collection[str], outcome: Outcome) -> None:
        """Report an outcome under tickets."""
        for ticket in tickets:
            self.outcomes[ticket] = outcome.value
            self.outcomes.move_to_end(ticket)
        while len(self.outcomes) > MAX_REMEMBERED:
            self.outcomes.popitem(last=False)
