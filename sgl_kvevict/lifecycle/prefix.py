"""One record per tree node: what is known of the prefix that ends there, and which changes its state allows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

from sgl_kvevict.compression import Observation, PendingFit, PromptObservation, ReaderObservation
from sgl_kvevict.config import KVEvictConfig
from sgl_kvevict.errors import InvariantError
from sgl_kvevict.lifecycle.job import ScoringJob
from sgl_kvevict.prefix import Span


class State(Enum):
    """What a node holds of its tokens, from most to least."""

    FULL = "full"
    """Its ordinary token slots."""
    LIGHT = "light"
    """A span of a segment that has more slots than the budget says."""
    COMPRESSED = "compressed"
    """A span of a segment at the budget; without further shares, every span."""
    SQUEEZED = "squeezed"
    """A span of a segment below the budget."""


class Change(Enum):
    """What may be done to a node's tokens."""

    INSTALL = auto()
    """Its slots are replaced by a span of a new segment."""
    GROW = auto()
    """Its segment is replaced by one that also holds newly generated tokens."""
    SQUEEZE = auto()
    """Its segment gives up entries, without any forward."""
    SPLIT = auto()
    """It is cut; both halves keep the state."""
    DROP = auto()
    """It leaves the tree."""


_SPANS = frozenset({State.LIGHT, State.COMPRESSED, State.SQUEEZED})
CHANGES: Mapping[tuple[State, Change], frozenset[State]] = {
    (State.FULL, Change.INSTALL): _SPANS,
    **{(state, Change.GROW): _SPANS for state in _SPANS},
    (State.LIGHT, Change.SQUEEZE): _SPANS,
    (State.COMPRESSED, Change.SQUEEZE): frozenset({State.SQUEEZED}),
    (State.SQUEEZED, Change.SQUEEZE): frozenset({State.SQUEEZED}),
    **{(state, Change.SPLIT): frozenset({state}) for state in State},
    **{(state, Change.DROP): frozenset() for state in State},
}
"""States that a change may lead to; nothing becomes full again. What is missing is refused."""


def next_states(state: State, change: Change) -> frozenset[State]:
    """Return the states that a change of a node may lead to; none: its record is gone.

    Raises:
        InvariantError: the state refuses the change; going on would leak slots or leave stale KV.
    """
    try:
        return CHANGES[state, change]
    except KeyError:
        raise InvariantError(f"the change {change.name} of a node whose state is {state.value!r}") from None


@dataclass(frozen=True)
class Pending:
    """A range that is compressed once nothing reads it exactly: the uncompressed tokens before ``end``.

    Attributes:
        end: logical position after the range's last token, where the record's node ends.
        observation: what to compress it with.
        share: how much to keep of it; None: what the budget says.
    """

    end: int
    observation: Observation
    share: float | None = None


@dataclass(frozen=True)
class SegmentFit:
    """The fit of a published segment, in the record of the last node that holds a span of it.

    Attributes:
        fit: computes values and biases, layer by layer.
        num_slots: of the segment when it was published.
    """

    fit: PendingFit
    num_slots: int


@dataclass(eq=False, slots=True)
class PrefixRecord:
    """Everything known of one node, and of the prefix that ends with it.

    Written only by :class:`~sgl_kvevict.lifecycle.table.PrefixTable`, whose queues index all parts after ``matches``.

    Attributes:
        span: the node's compressed tokens; None: they are uncompressed.
        matches: how many prompts have found the prefix.
        may_shrink: it shrinks when slots are short: an *end* of an uncompressed range, or the owner of a segment.
        is_stale: it was compressed with other weights, and must not be matched.
        prompt: what a prompt's prefill left behind to compress the range that ends here with.
        pending: a range that ends here and waits for exact readers.
        vote: what requests that extend the prefix have attended to.
        job: the prefix waits for scoring passes, or they are under way.
        fit: the fit of the segment that ends here.
    """

    span: Span | None = None
    matches: int = 0
    may_shrink: bool = False
    is_stale: bool = False
    prompt: PromptObservation | None = None
    pending: Pending | None = None
    vote: ReaderObservation | None = None
    job: ScoringJob | None = None
    fit: SegmentFit | None = None


def state_of(span: Span | None, config: KVEvictConfig | None) -> State:
    """Return the state of a node that holds a span, or none."""
    if span is None:
        return State.FULL
    if config is None or not config.shares:
        return State.COMPRESSED
    segment = span.segment
    excess = segment.num_slots - config.slots_at(float(config.budget), segment.end - segment.start)
    if excess == 0:
        return State.COMPRESSED
    return State.LIGHT if excess > 0 else State.SQUEEZED
