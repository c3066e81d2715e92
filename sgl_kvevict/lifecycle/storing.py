"""What goes to the store and when, which requests wait for it, and what comes of what it gave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any
from weakref import WeakKeyDictionary

from sgl_kvevict.guard import Guard, Place
from sgl_kvevict.lifecycle.nodes import Node, Reader, length_of
from sgl_kvevict.lifecycle.observer import LOAD_ERROR, LOAD_LATE, CacheObserver
from sgl_kvevict.lifecycle.ports import TreePort
from sgl_kvevict.lifecycle.spans import SpanTable
from sgl_kvevict.lifecycle.stored import Adoption, export_segment
from sgl_kvevict.prefix import SpanStore
from sgl_kvevict.store import Fetch, ReadAhead, SegmentRecord, StoreIdentity, Wanted, WriteBehind, Written


@dataclass(frozen=True)
class Waiting:
    """A request that waits for its prefix.

    Attributes:
        fetch: what it waits for.
        extra_key: its namespace.
        cache_salt: likewise.
    """

    fetch: Fetch
    extra_key: str | None
    cache_salt: str | None


@dataclass
class StoreTotals:
    """Counters since the server started.

    Attributes:
        stored: segments written.
        stored_bytes: bytes of them.
        already_stored: segments that the store had.
        not_stored: segments that could not be written.
        loaded: segments read and put into the tree.
        loaded_tokens: tokens that they stand for.
        not_placed: segments that were read, but another request had brought them, or there were no slots, or no place.
        late: fetches that requests did not wait for to the end.
        load_errors: errors of the store, and segments that were corrupt.
    """

    stored: int = 0
    stored_bytes: int = 0
    already_stored: int = 0
    not_stored: int = 0
    loaded: int = 0
    loaded_tokens: int = 0
    not_placed: int = 0
    late: int = 0
    load_errors: int = 0


class StoredPrefixes:
    """The prefixes of this server that a store has, and those that it could have from there.

    Args:
        tree: whose nodes.
        spans: what they hold.
        store: where rows are.
        adoption: puts into the tree what was read.
        identity: of this server.
        writer: takes segments.
        reader: fetches them.
        guard: holds errors; the prefix is then not stored, or computed.
        num_tail: tokens of a prompt's tail, which are stored with what comes before them.

    Attributes:
        observer: told of what was stored and loaded.
        totals: counters.
        is_on: False once the weights have changed: the identity is that of the files.
    """

    def __init__(
        self,
        tree: TreePort,
        spans: SpanTable,
        store: SpanStore,
        adoption: Adoption,
        identity: StoreIdentity,
        writer: WriteBehind,
        reader: ReadAhead | None,
        guard: Guard,
        num_tail: int,
    ) -> None:
        self.observer = CacheObserver()
        self.totals = StoreTotals()
        self.is_on = True
        self._tree = tree
        self._spans = spans
        self._store = store
        self._adoption = adoption
        self._identity = identity
        self._writer = writer
        self._reader = reader
        self._guard = guard
        self._num_tail = num_tail
        self._waiting: WeakKeyDictionary[Reader, Waiting] = WeakKeyDictionary()

    def switch_off(self) -> None:
        """The weights are not those of the identity any more: nothing is stored or loaded from now on."""
        self.is_on = False
        for waiting in tuple(self._waiting.values()):
            waiting.fetch.is_abandoned = True
        self._waiting.clear()

    def on_budget(self, last: Node) -> None:
        """A segment has come to the budget; ``last`` is the last node with a span of it. Copies, and never waits."""
        with self._guard.at(Place.STORE):
            segment = self._spans[last].segment
            row_bytes = self._store.k_arena.element_size() * self._store.geometry.head_dim
            num_bytes = 2 * row_bytes * segment.num_entries
            if not self.is_on:
                return
            if not self._writer.has_room(num_bytes):
                self.observer.stored(Written("", segment.end - segment.start, 0, "too many segments wait"))
                return
            leaving = export_segment(last, self._tree, self._spans, self._store, self._identity, self._num_tail)
            if leaving is not None:
                self._writer.write(leaving.record, leaving.namespace, leaving.num_bytes)

    def queued(self, reader: Reader, tokens: Sequence[int], extra_key: str | None, cache_salt: str | None) -> None:
        """A request was queued: see whether its prompt goes on beyond what the tree has, and begin to fetch.

        Args:
            reader: the request.
            tokens: of its prompt, those that it may find in a cache.
            extra_key: its namespace.
            cache_salt: likewise.
        """
        if not self.is_on or self._reader is None or len(tokens) < self._identity.min_prefix_tokens:
            return
        with self._guard.at(Place.STORE):
            path = self._tree.find(tokens, extra_key, cache_salt)
            namespace = self._identity.namespace(extra_key, cache_salt)
            fetch = self._reader.start(Wanted(tokens, namespace, self._spans.waterline(path), length_of(path)))
            if fetch is not None:
                self._waiting[reader] = Waiting(fetch, extra_key, cache_salt)

    def settle(self) -> set[Reader]:
        """Put what has come into the tree; return the requests that still wait. Between two steps only."""
        if self._reader is None or not self._waiting:
            return set()
        for reader, waiting in tuple(self._waiting.items()):
            if waiting.fetch.is_done:
                del self._waiting[reader]
                with self._guard.at(Place.STORE):
                    self._place(waiting)
            elif self._reader.is_late(waiting.fetch):
                del self._waiting[reader]
                self.totals.late += 1
                self.observer.load_failed(LOAD_LATE, "")
        return set(self._waiting)

    def between_steps(self) -> None:
        """Count and tell what was written since."""
        while self._writer.done:
            written = self._writer.done.popleft()
            if written.error is not None:
                self.totals.not_stored += 1
            elif written.num_bytes:
                self.totals.stored += 1
                self.totals.stored_bytes += written.num_bytes
            else:
                self.totals.already_stored += 1
            self.observer.stored(written)

    def state(self) -> dict[str, Any]:
        """Counters in plain numbers, for ``GET /server_info``."""
        return {
            **asdict(self.totals),
            "is_on": self.is_on,
            "dropped": self._writer.num_dropped,
            "skipped": 0 if self._reader is None else self._reader.num_skipped,
            "waiting": len(self._waiting),
        }

    @staticmethod
    def _goes_on(prompt: Sequence[int], record: SegmentRecord) -> bool:
        """Whether a prompt begins with all tokens of a segment's path and the first one of its tail."""
        assert record.tail_tokens is not None
        return list(prompt[: record.end + 1]) == [*record.tokens.tolist(), int(record.tail_tokens[0])]

    def _place(self, waiting: Waiting) -> None:
        for error in waiting.fetch.errors:
            self.totals.load_errors += 1
            self.observer.load_failed(LOAD_ERROR, error)
        for record in waiting.fetch.records:
            if not self._adoption.adopt(record, waiting.extra_key, waiting.cache_salt):
                self.totals.not_placed += 1
                continue
            self.totals.loaded += 1
            self.totals.loaded_tokens += record.end - record.start
            if record.tail_tokens is not None and self._goes_on(waiting.fetch.wanted.tokens, record):
                self._adoption.adopt_tail(record, waiting.extra_key, waiting.cache_salt)
            self.observer.loaded(record.key, record.start, record.end)
