"""A prefix to be read by scoring passes, and the result of that."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from sgl_kvevict.cache.nodes import Node
from sgl_kvevict.cache.probes import Probes
from sgl_kvevict.segments import PromptObservation, ReaderObservation


class Outcome(Enum):
    """The result of a job, reported under the tickets of the requests that asked for it."""

    QUEUED = "queued"
    """Its passes wait or are under way."""
    COMPRESSED = "compressed"
    """It is compressed; or its entries are being ranked, and are written two turns of the scheduler's loop later."""
    IN_USE = "in-use"
    """It was scored, and is compressed when the last request with ``exact`` that reads it is released."""
    TOO_SHORT = "too-short"
    """Its tokens that are not compressed yet are too few."""
    QUESTIONS_TOO_LATE = "questions-too-late"
    """It was compressed before, and what its questions attend to may be evicted; nothing has changed."""
    HAS_IMAGES = "has-images"
    """A pass cannot compute images again."""
    NO_ROOM = "no-room"
    """Prefix and probe together exceed the pool, or the server's longest request."""
    DROPPED = "dropped"
    """The prefix left the tree."""
    ABORTED = "aborted"
    """A pass was aborted, with all requests or because slots were short."""
    NO_MEMORY = "no-memory"
    """The observation of its passes exceeds ``observation_bytes``."""
    BUSY = "busy"
    """Too many prefixes wait."""
    FAILED = "failed"
    """An error was held; the server's log has it."""


@dataclass(eq=False)
class ScoringJob:
    """A prefix that passes are to read before it is compressed, or shrinks further.

    Attributes:
        node: last node of the prefix.
        questions: texts to append in its passes; (): the policy's own probes.
        tickets: hashes of the tickets under which its outcome is reported.
        is_wanted: a request asked for it (``warm``).
        prompt: observation of a prompt that found the prefix or asked for it; learned scores look at it.
        observation: of its passes; None until the job begins, like ``probes``.
        probes: texts that its passes still have to read.
        start: where the uncompressed tokens of the prefix began before the first pass.
        started: when the running pass was queued, seconds of ``time.perf_counter``.
    """

    node: Node
    questions: tuple[str, ...] = ()
    tickets: set[str] = field(default_factory=set)
    is_wanted: bool = False
    prompt: PromptObservation | None = None
    observation: ReaderObservation | None = None
    probes: Probes | None = None
    start: int = 0
    started: float = 0.0
