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
    """Or its entries are being ranked; they move two turns later."""
    IN_USE = "in-use"
    """Scored; compressed when the last request that reads it exactly is released."""
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
    """A prefix that passes are to read before it is compressed, or squeezed further.

    Attributes:
        node: last node of the prefix.
        questions: texts to append in its passes; (): the policy's own probes.
        tickets: hashes of the tickets under which its outcome is reported.
        is_wanted: a request asked for it.
        prompt: observation of a prompt that found the prefix or asked for it; learned scores look at it.
        observation: of its passes; None before the first, like ``probes``: the job is due.
        start: where the uncompressed tokens of the prefix began before the first pass.
    """

    node: Node
    questions: tuple[str, ...] = ()
    tickets: set[str] = field(default_factory=set)
    is_wanted: bool = False
    prompt: PromptObservation | None = None
    observation: ReaderObservation | None = None
    probes: Probes | None = None
    start: int = 0
    started: float = 0.0  # when the running pass was queued (seconds of `time.perf_counter`)
