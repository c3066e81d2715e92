"""Counts events of the cache in the totals, and hands them to subscribers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sgl_kvevict.cache.nodes import Node, tokens_of
from sgl_kvevict.events.totals import Totals
from sgl_kvevict.events.types import AnyEvent, Compressed, Repacked, Squeezed
from sgl_kvevict.guard import Guard, Place
from sgl_kvevict.segments import Segment


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

    def emit(self, event: AnyEvent) -> None:
        """Count an event, and hand it to the subscribers."""
        with self._guard.at(Place.LISTENER):
            self.totals.count(event)
            for subscriber in self.subscribers:
                with self._guard.at(Place.LISTENER):
                    subscriber(event)

    def compressed(
        self,
        nodes: Sequence[Node],
        segment: Segment,
        new_tokens: int,
        kept: int,
        merged: int,
        released: int,
        seconds: float,
    ) -> None:
        """Tell that consecutive nodes, root side first, now hold spans of one packed segment.

        Args:
            nodes: its nodes.
            segment: what they hold.
            new_tokens: tokens packed for the first time.
            kept: stored entries minus those that were packed before.
            merged: entries folded into stored ones.
            released: token slots given back.
            seconds: host time (on a GPU: launching only).
        """
        self.emit(
            Compressed(
                nodes=[node.id for node in nodes],
                start=segment.start,
                end=segment.end,
                new_tokens=new_tokens,
                slots=segment.num_slots,
                released_slots=released,
                bytes=segment.num_bytes,
                entries=segment.entries_by_bits,
                kept_entries=kept,
                evicted_entries=new_tokens * segment.geometry.num_runs - kept - merged,
                merged_entries=merged,
                seconds=seconds,
                policy=self._policy,
                token_ids=tokens_of(nodes) if self._exposes_tokens else None,
            )
        )

    def squeezed(self, owner: Node, segment: Segment, released: int, evicted: int) -> None:
        """Tell that a packed segment, whose topmost node is ``owner``, has shrunk.

        Args:
            owner: its topmost node.
            segment: as it is now.
            released: token slots given back.
            evicted: entries that it had before and has no more.
        """
        sizes = segment.num_slots, released, segment.num_bytes, segment.entries_by_bits
        self.emit(Squeezed(owner.id, *sizes, evicted_entries=evicted))

    def repacked(self, owner: Node, segment: Segment, released: int) -> None:
        """Tell that a segment that lost its lowest span was moved into fewer slots; arguments: see :meth:`squeezed`."""
        self.emit(Repacked(owner.id, segment.num_slots, released, segment.num_bytes, segment.entries_by_bits))

    def between_steps(self) -> None:
        """The scheduler is between two steps."""
        for turn in self.each_turn:
            with self._guard.at(Place.LISTENER):
                turn()
