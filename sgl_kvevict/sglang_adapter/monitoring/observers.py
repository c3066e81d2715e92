# ruff: noqa: D102 - the base class describes the methods
"""Who is told when the cache changes: counters, the event stream, and several at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sgl_kvevict.compression import Compression
from sgl_kvevict.events.questions import Totals
from sgl_kvevict.events.service import EventService
from sgl_kvevict.events.types import (
    Cleared,
    Compressed,
    Dropped,
    Loaded,
    LoadFailed,
    Refused,
    Repacked,
    ScoringPass,
    Split,
    Squeezed,
    Stored,
)
from sgl_kvevict.guard import Guard, Place
from sgl_kvevict.lifecycle.nodes import Node, tokens_of
from sgl_kvevict.lifecycle.observer import (
    LOAD_LATE,
    REFUSED_IN_USE,
    REFUSED_NO_MEMORY,
    REFUSED_NO_ROOM,
    CacheObserver,
)
from sgl_kvevict.prefix import Segment, Span
from sgl_kvevict.store import Written

SHOWN_KEY_DIGITS = 16
"""Of a segment's name, enough to find it: the whole name follows from tokens and salt."""


class ObserverGroup(CacheObserver):
    """Tells several observers, in order. One that fails is skipped: what it watches went on.

    Args:
        observers: whom to tell.
        guard: holds what they raise.
    """

    def __init__(self, observers: Sequence[CacheObserver], guard: Guard) -> None:
        self.observers = tuple(observers)
        self._guard = guard

    def _tell(self, tell: Callable[[CacheObserver], None]) -> None:
        for observer in self.observers:
            with self._guard.at(Place.OBSERVER):
                tell(observer)

    def compressed(self, nodes: Sequence[Node], compression: Compression) -> None:
        self._tell(lambda observer: observer.compressed(nodes, compression))

    def split(self, upper: Node, lower: Node, position: int) -> None:
        self._tell(lambda observer: observer.split(upper, lower, position))

    def dropped(self, node: Node, span: Span | None, slots: int) -> None:
        self._tell(lambda observer: observer.dropped(node, span, slots))

    def repacked(self, owner: Node, segment: Segment, released: int) -> None:
        self._tell(lambda observer: observer.repacked(owner, segment, released))

    def squeezed(self, owner: Node, segment: Segment, released: int) -> None:
        self._tell(lambda observer: observer.squeezed(owner, segment, released))

    def scored(self, start: int, end: int, seconds: float) -> None:
        self._tell(lambda observer: observer.scored(start, end, seconds))

    def refused(self, reason: str, num_tokens: int) -> None:
        self._tell(lambda observer: observer.refused(reason, num_tokens))

    def stored(self, written: Written) -> None:
        self._tell(lambda observer: observer.stored(written))

    def loaded(self, key: str, start: int, end: int) -> None:
        self._tell(lambda observer: observer.loaded(key, start, end))

    def load_failed(self, reason: str, error: str) -> None:
        self._tell(lambda observer: observer.load_failed(reason, error))

    def cleared(self) -> None:
        self._tell(lambda observer: observer.cleared())

    def between_steps(self) -> None:
        self._tell(lambda observer: observer.between_steps())


class CountingObserver(CacheObserver):
    """Keeps totals since the server started.

    Args:
        heads_per_token: entries of one uncompressed token.
    """

    def __init__(self, heads_per_token: int) -> None:
        self.totals = Totals()
        self._heads_per_token = heads_per_token

    def compressed(self, nodes: Sequence[Node], compression: Compression) -> None:
        totals = self.totals
        totals.compressions += 1
        totals.compressed_tokens += compression.new_tokens
        totals.compression_seconds += compression.seconds
        totals.released_slots += compression.freed.numel()
        totals.kept_entries += compression.new_entries
        totals.evicted_entries += evicted_entries(compression, self._heads_per_token)
        totals.merged_entries += compression.merged_entries

    def split(self, upper: Node, lower: Node, position: int) -> None:
        self.totals.splits += 1

    def dropped(self, node: Node, span: Span | None, slots: int) -> None:
        self.totals.dropped_nodes += 1
        self.totals.dropped_spans += span is not None
        self.totals.dropped_slots += slots

    def repacked(self, owner: Node, segment: Segment, released: int) -> None:
        self.totals.repacks += released > 0

    def squeezed(self, owner: Node, segment: Segment, released: int) -> None:
        self.totals.squeezes += 1
        self.totals.squeezed_slots += released

    def scored(self, start: int, end: int, seconds: float) -> None:
        self.totals.scoring_passes += 1

    def refused(self, reason: str, num_tokens: int) -> None:
        if reason == REFUSED_IN_USE:
            self.totals.refused_in_use += 1
        elif reason == REFUSED_NO_ROOM:
            self.totals.refused_no_room += 1
        elif reason == REFUSED_NO_MEMORY:
            self.totals.refused_no_memory += 1
        else:
            self.totals.refused_not_cached += 1

    def stored(self, written: Written) -> None:
        self.totals.stored_segments += written.num_bytes > 0
        self.totals.stored_bytes += written.num_bytes
        self.totals.not_stored += written.error is not None

    def loaded(self, key: str, start: int, end: int) -> None:
        self.totals.loaded_segments += 1
        self.totals.loaded_tokens += end - start

    def load_failed(self, reason: str, error: str) -> None:
        if reason == LOAD_LATE:
            self.totals.late_loads += 1
        else:
            self.totals.failed_loads += 1

    def cleared(self) -> None:
        self.totals.clears += 1


class PublishingObserver(CacheObserver):
    """Publishes every change on the event stream.

    Args:
        service: where to publish.
        policy: name of the policy.
        heads_per_token: entries of one uncompressed token.
    """

    def __init__(self, service: EventService, policy: str, heads_per_token: int) -> None:
        self._publish = service.publish
        self._exposes_tokens = service.config.expose_tokens
        self._policy = policy
        self._heads_per_token = heads_per_token

    def compressed(self, nodes: Sequence[Node], compression: Compression) -> None:
        self._publish(
            Compressed(
                nodes=[node.id for node in nodes],
                start=compression.start,
                end=compression.start + compression.num_tokens,
                slots=compression.segment.num_slots,
                released_slots=compression.freed.numel(),
                kept_entries=compression.segment.num_entries,
                evicted_entries=evicted_entries(compression, self._heads_per_token),
                merged_entries=compression.merged_entries,
                seconds=compression.seconds,
                policy=self._policy,
                token_ids=tokens_of(nodes) if self._exposes_tokens else None,
            )
        )

    def split(self, upper: Node, lower: Node, position: int) -> None:
        self._publish(Split(upper.id, lower.id, position))

    def dropped(self, node: Node, span: Span | None, slots: int) -> None:
        self._publish(Dropped(node.id, len(node.key), slots, span is not None))

    def repacked(self, owner: Node, segment: Segment, released: int) -> None:
        if released:
            self._publish(Repacked(owner.id, segment.num_slots, released))

    def squeezed(self, owner: Node, segment: Segment, released: int) -> None:
        self._publish(Squeezed(owner.id, segment.num_slots, released))

    def scored(self, start: int, end: int, seconds: float) -> None:
        self._publish(ScoringPass(start, end, seconds))

    def refused(self, reason: str, num_tokens: int) -> None:
        self._publish(Refused(reason, num_tokens))

    def stored(self, written: Written) -> None:
        self._publish(Stored(written.key[:SHOWN_KEY_DIGITS], written.num_tokens, written.num_bytes, written.error))

    def loaded(self, key: str, start: int, end: int) -> None:
        self._publish(Loaded(key[:SHOWN_KEY_DIGITS], start, end))

    def load_failed(self, reason: str, error: str) -> None:
        self._publish(LoadFailed(reason, error))

    def cleared(self) -> None:
        self._publish(Cleared())


def evicted_entries(compression: Compression, heads_per_token: int) -> int:
    """Entries of the range that are neither stored nor merged into stored ones."""
    return compression.new_tokens * heads_per_token - compression.new_entries - compression.merged_entries
