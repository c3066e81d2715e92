"""Prefixes that are to be read before they are compressed, and what became of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from enum import Enum

from sgl_kvevict.compression import PromptObservation, ReaderObservation
from sgl_kvevict.distill import Lesson
from sgl_kvevict.lifecycle.nodes import Node
from sgl_kvevict.lifecycle.probes import Probes

MAX_REMEMBERED = 256
"""Outcomes that are remembered for who asks."""
MAX_JOBS = 1024
"""Prefixes that may wait for passes; who asks for more is told "busy"."""

MAX_BEGUN_JOBS = 4
"""Jobs between two of their passes, which hold memory; others begin when one of them ends."""

NamespaceKey = tuple[str | None, str | None]
"""(extra_key, cache_salt): prompts of different ones share nothing."""


class Outcome(Enum):
    """What became of a job; told to who asked for it."""

    QUEUED = "queued"
    """It waits for its passes, or they are under way."""
    COMPRESSED = "compressed"
    IN_USE = "in-use"
    """Scored; compressed when the last request leaves that reads it exactly."""
    TOO_SHORT = "too-short"
    NO_ROOM = "no-room"
    """Prefix and probe together do not fit into the pool, or into what the server allows a request."""
    DROPPED = "dropped"
    """The prefix left the tree."""
    ABORTED = "aborted"
    """A pass was aborted: somebody aborted all requests, or slots were short."""
    NO_MEMORY = "no-memory"
    """What its passes would see takes more memory than is allowed."""
    BUSY = "busy"
    """Too many prefixes wait."""
    FAILED = "failed"
    """An error was held; the server's log has it."""


@dataclass(eq=False)
class ScoringJob:
    """A prefix that is to be read before it is compressed.

    Attributes:
        node: last node of the prefix.
        questions: texts to read it with; () for the policy's own way.
        tickets: hashes of the tickets of those who asked for it and want to know what became of it.
        is_wanted: some request asked for it.
        prompt: what the prefill of a prompt left behind that found the prefix or asked for it; None if nobody
            learns from it.
        observation: what the passes have seen; None before the first.
        probes: what is still to be appended to the prefix, pass by pass; None before the first.
        started: when the pass that runs was handed to the scheduler (seconds, monotonic).
        lesson: what is being learned from the prefix, after its last pass.
    """

    node: Node
    questions: tuple[str, ...] = ()
    tickets: set[str] = field(default_factory=set)
    is_wanted: bool = False
    prompt: PromptObservation | None = None
    observation: ReaderObservation | None = None
    probes: Probes | None = None
    started: float = 0.0
    lesson: Lesson | None = None

    @property
    def namespace(self) -> NamespaceKey:
        """Whose prefix it is."""
        return self.node.key.extra_key, self.node.key.cache_salt


class ScoringJobs:
    """Jobs in the order in which they came, at most one per node; those of several namespaces take turns.

    Attributes:
        outcomes: by ticket, the newest last, a limited number.
    """

    def __init__(self) -> None:
        self.outcomes: OrderedDict[str, str] = OrderedDict()
        self._by_node: dict[Node, ScoringJob] = {}
        self._turns: dict[NamespaceKey, int] = {}
        self._num_turns = 0

    def __len__(self) -> int:
        return len(self._by_node)

    def at(self, node: Node) -> ScoringJob | None:
        """The job of the prefix that ends with a node."""
        return self._by_node.get(node)

    def next(self, prefers: Callable[[ScoringJob], bool] = lambda job: True) -> ScoringJob | None:
        """The oldest job of the namespace whose turn it is: the one that had none, or had its last one longest ago.

        Args:
            prefers: jobs that come before all others.
        """
        begun = self.begun
        candidates = begun if len(begun) >= MAX_BEGUN_JOBS else self._by_node.values()
        return min(candidates, key=lambda job: (not prefers(job), self._turns.get(job.namespace, 0)), default=None)

    @property
    def begun(self) -> list[ScoringJob]:
        """Jobs between two of their passes."""
        return [job for job in self._by_node.values() if job.observation is not None]

    @property
    def num_bytes(self) -> int:
        """Memory of what passes have seen, and of prompts that are kept to be learned from."""
        kept = (part for job in self._by_node.values() for part in (job.observation, job.prompt) if part is not None)
        return sum(part.num_bytes for part in kept)

    def take_turn(self, job: ScoringJob) -> None:
        """A pass of a job begins."""
        self._num_turns += 1
        self._turns[job.namespace] = self._num_turns

    def add(self, job: ScoringJob) -> None:
        """Queue a job, or join it with one for the same prefix: what was asked for last replaces what was before."""
        queued = self._by_node.get(job.node)
        if queued is None and len(self._by_node) < MAX_JOBS:
            self._by_node[job.node] = job
        elif queued is None or len(queued.tickets) + len(job.tickets) > MAX_REMEMBERED:
            self._tell(job.tickets, Outcome.BUSY)
            return
        else:
            queued.tickets |= job.tickets
            if job.is_wanted and queued.observation is None:
                queued.questions, queued.is_wanted = job.questions, True
        self._tell(job.tickets, Outcome.QUEUED)

    def refuse(self, tickets: Collection[str], outcome: Outcome) -> None:
        """What was wished for never became a job."""
        self._tell(tickets, outcome)

    def end(self, job: ScoringJob, outcome: Outcome) -> None:
        """A job is over, or was refused before it was queued."""
        self._tell(job.tickets, outcome)
        if self._by_node.get(job.node) is not job:
            return
        del self._by_node[job.node]
        if job.observation is not None:
            job.observation.close()
        waiting = {other.namespace for other in self._by_node.values()}
        self._turns = {name: turn for name, turn in self._turns.items() if name in waiting}

    def clear(self) -> None:
        """All prefixes were dropped."""
        for job in list(self._by_node.values()):
            self.end(job, Outcome.DROPPED)

    def _tell(self, tickets: Collection[str], outcome: Outcome) -> None:
        for ticket in tickets:
            self.outcomes[ticket] = outcome.value
            self.outcomes.move_to_end(ticket)
        while len(self.outcomes) > MAX_REMEMBERED:
            self.outcomes.popitem(last=False)
