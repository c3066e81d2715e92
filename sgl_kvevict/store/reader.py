"""Read-ahead: while a request waits in the queue, threads fetch the stored segments of its prompt."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from threading import Lock
from weakref import WeakValueDictionary

from sgl_kvevict.errors import CorruptSegmentError, StoreError, UnreadableItemError
from sgl_kvevict.store.segment_file import SegmentRecord
from sgl_kvevict.store.segments import SegmentStore
from sgl_kvevict.store.tier import Lookup
from sgl_kvevict.store.workers import Workers

NUM_THREADS = 4
MAX_WAITING = 64
"""Fetches that may wait for a thread; further requests go on without the store."""
MAX_SEGMENTS = 8
"""Segments fetched one after the other for one prompt."""
PAUSE_S = 5.0
"""Time without reads after the store failed, or delivered nothing while a request waited."""


@dataclass(eq=False)
class Fetch:
    """A fetch under way.

    Attributes:
        deadline: when its request stops waiting (``time.monotonic``).
        records: segments found, in the order of the path; complete when ``is_done``.
        is_abandoned: no request waits for it any more.
    """

    lookup: Lookup
    deadline: float
    records: list[SegmentRecord] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    is_done: bool = False
    is_abandoned: bool = False


class ReadAhead:
    """Fetches stored segments of prompts; a request waits at most ``wait_s`` seconds.

    ``num_skipped``: prompts not looked up, because the store had failed or too many fetches waited.
    """

    def __init__(self, store: SegmentStore, wait_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_skipped = 0
        self._store = store
        self._min_tokens = store.identity.min_prefix_tokens
        self._wait_s = wait_s
        self._clock = clock
        self._paused_until = float("-inf")
        self._last_given = float("-inf")
        self._workers = Workers("kvevict-store-read", NUM_THREADS, MAX_WAITING)
        # Weak: requests of one burst share a read while any of them holds it, and nothing stays in memory after them.
        self._recent: WeakValueDictionary[str, SegmentRecord] = WeakValueDictionary()
        # A few fixed locks by hash of the key, more than threads, so that two different keys seldom wait for each
        # other.
        self._locks = [Lock() for _ in range(4 * NUM_THREADS)]

    def deadline(self) -> float:
        """When a request that starts to wait now stops waiting."""
        return self._clock() + self._wait_s

    def has_passed(self, deadline: float) -> bool:
        """Whether a deadline has passed."""
        return self._clock() >= deadline

    def start(self, lookup: Lookup) -> Fetch | None:
        """Start a fetch; None: too little to gain, reads are paused, or too many fetches wait."""
        # `continuing` would not yield a shorter gain.
        if len(lookup.tokens) - lookup.cached < self._min_tokens:
            return None
        fetch = Fetch(lookup, self.deadline())
        if self.has_passed(self._paused_until) and self._workers.submit(lambda: self._run(fetch)):
            return fetch
        self.num_skipped += 1
        return None

    def is_late(self, fetch: Fetch) -> bool:
        """Whether a fetch has missed its deadline; it is then abandoned.

        If no fetch at all has ended meanwhile, reads are paused.
        """
        now = self._clock()
        if fetch.is_done or now < fetch.deadline:
            return False
        fetch.is_abandoned = True
        # If other fetches ended meanwhile, the store works and this one is only large.
        if now - self._last_given >= self._wait_s:
            self._pause()
        return True

    # ---- in a thread ------------------------------------------------------------------------------------------

    def _run(self, fetch: Fetch) -> None:
        try:
            if not fetch.is_abandoned:
                self._fetch(fetch)
                self._last_given = self._clock()
        except StoreError as error:
            fetch.errors.append(str(error))
            # These are damage to one item; anything else is the store's, and each further prompt would wait for its
            # time-out.
            if not isinstance(error, CorruptSegmentError | UnreadableItemError):
                self._pause()
        finally:
            # Last, and after an exception, too: the scheduler reads `records` only when this is set, so they need no
            # lock.
            fetch.is_done = True

    def _fetch(self, fetch: Fetch) -> None:
        lookup = fetch.lookup
        found = self._store.find(lookup.tokens, lookup.namespace)
        records = self._store.continuing(lookup, found, lambda key: self._get(fetch, key))
        for record in islice(records, MAX_SEGMENTS):
            # Checked before each read: the request went on, and the thread is wanted by those that still wait.
            if fetch.is_abandoned:
                return
            fetch.records.append(record)

    def _get(self, fetch: Fetch, key: str) -> SegmentRecord | None:
        """Read a segment; concurrent fetches share the read. A corrupt one is removed."""
        # The second fetch of a key waits here, and then finds what the first one has read.
        with self._locks[int(key[:8], 16) % len(self._locks)]:
            record = self._recent.get(key)
            if record is not None:
                return record
            try:
                record = self._store.get(key)
            except UnreadableItemError as error:
                fetch.errors.append(str(error))
            except CorruptSegmentError as error:
                fetch.errors.append(f"{key}: {error}")
                with suppress(StoreError):  # a read-only store
                    # Else every prompt with this beginning would read it, and pay for the check, again.
                    self._store.delete(key)
            if record is not None:
                self._recent[key] = record
            return record

    def _pause(self) -> None:
        self._paused_until = self._clock() + PAUSE_S
