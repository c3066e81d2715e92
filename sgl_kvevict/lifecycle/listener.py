"""Turns every change of the cache into an event, counts it in the totals and hands it to subscribers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sgl_kvevict.compression import Compression
from sgl_kvevict.events.totals import Totals
from sgl_kvevict.events.types import (
    AnyEvent,
    Cleared,
    Compressed,
    Dropped,
    Loaded,
    LoadFailed,
    MovedIn,
    MovedOut,
    PrefilledCompressed,
    Refused,
    Repacked,
    ScoringPass,
    Split,
    Squeezed,
    Stored,
)
from sgl_kvevict.guard import Guard, Place
from sgl_kvevict.lifecycle.nodes import Node, tokens_of
from sgl_kvevict.prefix import Segment, Span
from sgl_kvevict.store import Written

REFUSED_IN_USE = "in-use"
REFUSED_NOT_CACHED = "not-cached"
REFUSED_NO_ROOM = "no-room"
REFUSED_NO_MEMORY = "no-memory"
LOAD_LATE = "late"
LOAD_ERROR = "error"
LOAD_NO_PLACE = "no-place"

SHOWN_KEY_DIGITS = 16
"""Digits of a segment's name in an event: the whole name would be a digest of tokens and salt."""


class CacheListener:
    """Is called right after every change, on the scheduler's thread.

    An error in counting, or in one subscriber, is held: the cache and the other subscribers go on.

    Attributes:
        subscribers: called with each event.
        each_turn: called at every turn of the scheduler's loop; must be cheap.
    """

    def __init__(
        self,
        guard: Guard | None = None,
        totals: Totals | None = None,
        *,
        policy: str = "none",
        exposes_tokens: bool = False,
    ) -> None:
        self.totals = totals or Totals()
        self.subscribers: list[Callable[[AnyEvent], None]] = []
        self.each_turn: list[Callable[[], None]] = []
        self._guard = guard or Guard()
        self._policy = policy
        self._exposes_tokens = exposes_tokens

    def _tell(self, make: Callable[[], AnyEvent]) -> None:
        with self._guard.at(Place.LISTENER):
            event = make()
            self.totals.count(event)
            for subscriber in self.subscribers:
                with self._guard.at(Place.LISTENER):
                    subscriber(event)

    def compressed(self, nodes: Sequence[Node], compression: Compression) -> None:
        """Consecutive nodes, root side first, now hold spans of one new segment."""

        def event() -> Compressed:
            segment = compression.segment
            entries = compression.new_tokens * segment.geometry.num_runs
            return Compressed(
                nodes=[node.id for node in nodes],
                start=compression.start,
                end=compression.start + compression.num_tokens,
                new_tokens=compression.new_tokens,
                slots=segment.num_slots,
                released_slots=compression.freed.numel(),
                kept_entries=compression.new_entries,
                evicted_entries=entries - compression.new_entries - compression.merged_entries,
                merged_entries=compression.merged_entries,
                seconds=compression.seconds,
                policy=self._policy,
                token_ids=tokens_of(nodes) if self._exposes_tokens else None,
            )

        self._tell(event)

    def split(self, upper: Node, lower: Node, position: int) -> None:
        """A span was cut at a logical position; ``lower`` is the node that held it."""
        self._tell(lambda: Split(upper.id, lower.id, position))

    def dropped(self, node: Node, span: Span | None, slots: int) -> None:
        """A node left the tree and ``slots`` token slots were released at once; ``span``: what it held."""
        self._tell(lambda: Dropped(node.id, len(node.key), slots, span is not None))

    def repacked(self, owner: Node, segment: Segment, released: int) -> None:
        """The segment of ``owner`` released ``released`` token slots; no event if 0."""
        if released:
            self._tell(lambda: Repacked(owner.id, segment.num_slots, released))

    def squeezed(self, owner: Node, segment: Segment, released: int) -> None:
        """Slots were short: the segment of ``owner`` gave up entries of least worth, and ``released`` slots."""
        self._tell(lambda: Squeezed(owner.id, segment.num_slots, released))

    def prefilled_compressed(self, num_tokens: int) -> None:
        """A prompt is complete of which so many computed tokens were compressed before its last chunk."""
        self._tell(lambda: PrefilledCompressed(num_tokens))

    def scored(self, start: int, end: int, seconds: float) -> None:
        """A scoring pass read the tokens ``[start, end)``."""
        self._tell(lambda: ScoringPass(start, end, seconds))

    def refused(self, reason: str, num_tokens: int) -> None:
        """Tokens could not be compressed (``in-use``), cached (``not-cached``) or scored (``no-room``).

        ``no-memory``: their observation exceeds ``observation_bytes``.
        """
        self._tell(lambda: Refused(reason, num_tokens))

    def stored(self, written: Written) -> None:
        """A segment was written to the store, was already there, or could not be written."""
        self._tell(lambda: Stored(written.key[:SHOWN_KEY_DIGITS], written.num_tokens, written.num_bytes, written.error))

    def loaded(self, key: str, start: int, end: int) -> None:
        """The tokens ``[start, end)`` of a path were loaded from the store, compressed."""
        self._tell(lambda: Loaded(key[:SHOWN_KEY_DIGITS], start, end))

    def load_failed(self, reason: str, error: str = "") -> None:
        """A request goes on without a segment of the store: ``late``, ``no-place`` in the tree, or an ``error``."""
        self._tell(lambda: LoadFailed(reason, error))

    def moved_out(self, key: str, start: int, end: int, num_bytes: int, pushed_out: int) -> None:
        """The tokens ``[start, end)`` of a path were copied to the host's memory, as they leave the pool."""
        self._tell(lambda: MovedOut(key[:SHOWN_KEY_DIGITS], start, end, num_bytes, pushed_out))

    def moved_in(self, key: str, start: int, end: int, num_bytes: int, seconds: float) -> None:
        """The tokens ``[start, end)`` of a path came back from the host's memory."""
        self._tell(lambda: MovedIn(key[:SHOWN_KEY_DIGITS], start, end, num_bytes, seconds))

    def cleared(self) -> None:
        """The whole cache was flushed."""
        self._tell(Cleared)

    def between_steps(self) -> None:
        """The scheduler is between two steps."""
        for turn in self.each_turn:
            with self._guard.at(Place.LISTENER):
                turn()
