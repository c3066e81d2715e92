"""A prefix to be read by scoring passes, and the table of what an event does to it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from sgl_kvevict.compression import PromptObservation, ReaderObservation
from sgl_kvevict.errors import InvariantError
from sgl_kvevict.lifecycle.nodes import Node
from sgl_kvevict.lifecycle.probes import Probes


class Outcome(Enum):
    """The result of a job, reported under the tickets of the requests that asked for it."""

    QUEUED = "queued"
    """Its passes wait or are under way."""
    COMPRESSED = "compressed"
    """Or its entries are being chosen; they move two turns later."""
    IN_USE = "in-use"
    """Scored; compressed when the last request that reads it exactly is released."""
    TOO_SHORT = "too-short"
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


class Stage(Enum):
    """Progress of a job."""

    DUE = auto()
    """It waits for its first pass."""
    SCORING = auto()
    """Its passes are under way; nothing is locked between two of them."""


class JobEvent(Enum):
    """Events of a job."""

    TURN = auto()
    """It may start its next pass."""
    PASS_READ = auto()
    """Its pass was prefilled to the end."""
    ABORTED = auto()
    """Its pass was aborted."""
    DROPPED = auto()
    """Its prefix left the tree, or the tree was flushed."""
    FAILED = auto()
    """An exception was held while the job was worked on."""


class Fact(Enum):
    """Conditions that the rules test when an event occurs."""

    NOTHING_LEFT = auto()
    """Its prefix is compressed, and further passes would not improve it."""
    CHANGED = auto()
    """The range of its passes was compressed elsewhere, without handing over to its observation."""
    UNUSABLE = auto()
    """An error was held while its observation was recorded."""
    PROBES_LEFT = auto()


class Action(Enum):
    """Next step of a job that continues."""

    BEGIN = auto()
    """Allocate its observation, lay out its probes, and start the first pass."""
    START_PASS = auto()
    COMPRESS = auto()
    """Shrink segments that were compressed early, and compress with the passes' observation."""
    WAIT = auto()
    """Nothing until its next turn."""


Rule = tuple[Fact | None, Action | Outcome]
"""The step to take if a fact holds; None always holds."""

RULES: Mapping[tuple[Stage, JobEvent], tuple[Rule, ...]] = {
    (Stage.DUE, JobEvent.TURN): ((Fact.NOTHING_LEFT, Outcome.COMPRESSED), (None, Action.BEGIN)),
    (Stage.SCORING, JobEvent.TURN): ((Fact.CHANGED, Outcome.COMPRESSED), (None, Action.START_PASS)),
    (Stage.SCORING, JobEvent.PASS_READ): (
        (Fact.UNUSABLE, Outcome.FAILED),
        (Fact.CHANGED, Outcome.COMPRESSED),
        (Fact.PROBES_LEFT, Action.WAIT),
        (None, Action.COMPRESS),
    ),
    **{(stage, JobEvent.ABORTED): ((None, Outcome.ABORTED),) for stage in Stage},
    **{(stage, JobEvent.DROPPED): ((None, Outcome.DROPPED),) for stage in Stage},
    **{(stage, JobEvent.FAILED): ((None, Outcome.FAILED),) for stage in Stage},
}
"""The first rule whose fact holds applies. Missing pairs cannot occur: a pass needs an observation, for instance."""


def decide(stage: Stage, event: JobEvent, facts: Collection[Fact] = ()) -> Action | Outcome:
    """Return what an event does to a job: an action, or the outcome that ends it.

    Raises:
        InvariantError: the event cannot happen at this stage.
    """
    for fact, step in RULES.get((stage, event), ()):
        if fact is None or fact in facts:
            return step
    raise InvariantError(f"the event {event.name} cannot happen to a job at stage {stage.name}")


@dataclass(eq=False)
class ScoringJob:
    """A prefix that passes are to read before it is compressed, or squeezed further.

    Attributes:
        node: last node of the prefix.
        questions: texts to append in its passes; (): the policy's own probes.
        tickets: hashes of the tickets under which its outcome is reported.
        is_wanted: a request asked for it.
        prompt: observation of a prompt that found the prefix or asked for it; learned scores look at it.
        observation: attention of its passes; None before the first, like ``probes``.
    """

    node: Node
    questions: tuple[str, ...] = ()
    tickets: set[str] = field(default_factory=set)
    is_wanted: bool = False
    prompt: PromptObservation | None = None
    observation: ReaderObservation | None = None
    probes: Probes | None = None
    started: float = 0.0  # when the running pass was queued (seconds of `time.perf_counter`)

    @property
    def stage(self) -> Stage:
        """Its progress, which follows from ``observation``."""
        return Stage.DUE if self.observation is None else Stage.SCORING
