# ruff: noqa: D102 - the base class describes the methods
"""Every change of the cache goes out on the event stream."""

from __future__ import annotations

from collections.abc import Sequence

from sgl_kvevict.compression import Compression
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
from sgl_kvevict.lifecycle.listener import CacheListener
from sgl_kvevict.lifecycle.nodes import Node, tokens_of
from sgl_kvevict.prefix import Segment, Span
from sgl_kvevict.sglang_adapter.monitoring.totals import evicted_entries
from sgl_kvevict.store import Written

SHOWN_KEY_DIGITS = 16
"""Of a segment's name, enough to find it: the whole name follows from tokens and salt."""


class EventStreamListener(CacheListener):
    """Publishes every change on the event stream.

    Args:
        service: where to publish.
        policy: name of the policy.
        num_runs: entries of one uncompressed token.
    """

    def __init__(self, service: EventService, policy: str, num_runs: int) -> None:
        self._publish = service.publish
        self._exposes_tokens = service.config.expose_tokens
        self._policy = policy
        self._num_runs = num_runs

    def compressed(self, nodes: Sequence[Node], compression: Compression) -> None:
        self._publish(
            Compressed(
                nodes=[node.id for node in nodes],
                start=compression.start,
                end=compression.start + compression.num_tokens,
                slots=compression.segment.num_slots,
                released_slots=compression.freed.numel(),
                kept_entries=compression.segment.num_entries,
                evicted_entries=evicted_entries(compression, self._num_runs),
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
