"""Ranges that are to be compressed, and the table of what an event does to one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import Enum, auto

from sgl_kvevict.compression import Chosen, Observation
from sgl_kvevict.errors import InvariantError


class RangeStage(Enum):
    """Progress of a range."""

    WAITING = auto()
    """For an exact reader's end, or for another range that begins at the same token."""
    CHOOSING = auto()
    """Its entries are being chosen beside running requests' steps; its tokens keep their slots."""


class RangeEvent(Enum):
    """Events of a range."""

    RELEASED = auto()
    """A reader was released, or another range is compressed."""
    TURN = auto()
    """The scheduler is between two steps."""
    SHORT = auto()
    """Token slots are short."""


class RangeFact(Enum):
    """Conditions that the rules test when an event occurs."""

    TOO_SHORT = auto()
    """Its first tokens were compressed elsewhere, and too few are left."""
    EARLY = auto()
    """No step need have been launched since its entries began to be chosen."""
    FIXED = auto()
    """A reader is not movable."""
    CHANGED = auto()
    """Its first tokens were compressed elsewhere, or a segment that cannot be split would have to end inside one."""
    BUSY = auto()
    """The entries of a range that begins at the same token are being chosen."""


class RangeStep(Enum):
    """Next step of a range."""

    FORGET = auto()
    STAY = auto()
    CHOOSE = auto()
    """Launch scoring and selection; where nothing runs beside, exchange at once."""
    EXCHANGE = auto()
    """Move the chosen rows, behind the choice, and exchange nodes, rows and slots."""
    WAIT = auto()
    """Give up the choice, and wait."""


_TOO_SHORT = (RangeFact.TOO_SHORT, RangeStep.FORGET)
RULES: Mapping[tuple[RangeStage, RangeEvent], tuple[tuple[RangeFact | None, RangeStep], ...]] = {
    (RangeStage.WAITING, RangeEvent.RELEASED): (
        _TOO_SHORT,
        (RangeFact.FIXED, RangeStep.STAY),
        (RangeFact.BUSY, RangeStep.STAY),
        (None, RangeStep.CHOOSE),
    ),
    (RangeStage.CHOOSING, RangeEvent.RELEASED): ((None, RangeStep.STAY),),
    (RangeStage.CHOOSING, RangeEvent.TURN): (
        _TOO_SHORT,
        (RangeFact.EARLY, RangeStep.STAY),
        (RangeFact.FIXED, RangeStep.WAIT),
        (RangeFact.CHANGED, RangeStep.CHOOSE),
        (None, RangeStep.EXCHANGE),
    ),
    (RangeStage.CHOOSING, RangeEvent.SHORT): (
        _TOO_SHORT,
        (RangeFact.FIXED, RangeStep.STAY),
        (RangeFact.CHANGED, RangeStep.STAY),
        (None, RangeStep.EXCHANGE),
    ),
}
"""The first rule whose fact holds applies (None always holds). A waiting range has no turn, and releases nothing."""


def next_step(stage: RangeStage, event: RangeEvent, facts: Collection[RangeFact] = ()) -> RangeStep:
    """Return what an event does to a range.

    Raises:
        InvariantError: the event cannot happen at this stage.
    """
    for fact, step in RULES.get((stage, event), ()):
        if fact is None or fact in facts:
            return step
    raise InvariantError(f"the event {event.name} cannot happen to a range at stage {stage.name}")


@dataclass(frozen=True)
class Choice:
    """Entries of a range that are being chosen.

    ``start``: logical position of its first token. ``ends`` and ``results``: where each segment ends, and its kept
    entries; fewer than the range has if the policy failed. ``turn``: the scheduler's turn in which they were launched.
    """

    start: int
    ends: tuple[int, ...]
    results: tuple[Callable[[], Chosen], ...]
    turn: int


@dataclass(frozen=True)
class Pending:
    """The uncompressed range before ``end``, to be compressed.

    ``end``: logical position after its last token, where the record's node ends. ``share``: None means the budget.
    ``choice``: None while it waits.
    """

    end: int
    observation: Observation
    share: float | None = None
    choice: Choice | None = None

    @property
    def stage(self) -> RangeStage:
        """Its progress, which follows from ``choice``."""
        return RangeStage.WAITING if self.choice is None else RangeStage.CHOOSING
