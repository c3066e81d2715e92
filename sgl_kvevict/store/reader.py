"""Read-ahead: while a request waits in the queue, threads fetch the stored segments of its prompt."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice, takewhile
from operator import eq
from threading import Lock
from weakref import WeakValueDictionary

from sgl_kvevict.errors import CorruptSegmentError, StoreError, UnreadableItemError
from sgl_kvevict.store.identity import Namespace
from sgl_kvevict.store.manifest import ManifestEntry
from sgl_kvevict.store.segment_file import SegmentRecord
from sgl_kvevict.store.segments import SegmentStore
from sgl_kvevict.store.workers import Workers

_Listed = ManifestEntry | SegmentRecord
"""A segment before its entries are read."""
NUM_THREADS = 4
MAX_WAITING = 64
"""Fetches that may wait for a thread; further requests go on without the store."""
MAX_SEGMENTS = 8
"""Segments fetched one after the other for one prompt."""
MAX_TRIES = 8
"""Segments read to find the longest match: block hashes do not cover the last tokens."""
MIN_USED = 0.5
"""Share of a segment's tokens that a prompt must share, so that fetching all of it pays."""
PAUSE_S = 5.0
"""Time without reads after the store failed, or delivered nothing while a request waited."""


@dataclass(frozen=True)
class Wanted:
    """A prompt to look up; the tree has its first ``cached`` tokens, ``compressed`` of them in spans."""

    tokens: Sequence[int]
    namespace: Namespace
    compressed: int
    cached: int


@dataclass(eq=False)
class Fetch:
    """A fetch under way.

    Attributes:
        deadline: when its request stops waiting (``time.monotonic``).
        records: segments found, in the order of the path; complete when ``is_done``.
        is_abandoned: no request waits for it any more.
    """

    wanted: Wanted
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
        self._recent: WeakValueDictionary[str, SegmentRecord] = WeakValueDictionary()
        self._locks = [Lock() for _ in range(4 * NUM_THREADS)]

    def deadline(self) -> float:
        """When a request that starts to wait now stops waiting."""
        return self._clock() + self._wait_s

    def has_passed(self, deadline: float) -> bool:
        """Whether a deadline has passed."""
        return self._clock() >= deadline

    def start(self, wanted: Wanted) -> Fetch | None:
        """Start a fetch; None: too little to gain, reads are paused, or too many fetches wait."""
        if len(wanted.tokens) - wanted.cached < self._min_tokens:
            return None
        fetch = Fetch(wanted, self.deadline())
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
        self.abandon(fetch)
        if now - self._last_given >= self._wait_s:
            self._pause()
        return True

    def abandon(self, fetch: Fetch) -> None:
        """Mark a fetch that no request waits for any more."""
        fetch.is_abandoned = True

    # ---- in a thread ------------------------------------------------------------------------------------------

    def _run(self, fetch: Fetch) -> None:
        try:
            if not fetch.is_abandoned:
                self._fetch(fetch)
                self._last_given = self._clock()
        except StoreError as error:
            fetch.errors.append(str(error))
            if not isinstance(error, CorruptSegmentError | UnreadableItemError):
                self._pause()
        finally:
            fetch.is_done = True

    def _fetch(self, fetch: Fetch) -> None:
        wanted = fetch.wanted
        entries = self._store.find(wanted.tokens, wanted.namespace)
        chain = wanted.namespace.chain(wanted.tokens) if entries else ""
        found = [(entry.overlap(chain, len(wanted.tokens)), entry) for entry in entries]
        records = segments_of(wanted, found, lambda key: self._get(fetch, key), self._min_tokens)
        for record in islice(records, MAX_SEGMENTS):
            if fetch.is_abandoned:
                return
            fetch.records.append(record)

    def _get(self, fetch: Fetch, key: str) -> SegmentRecord | None:
        """Read a segment; concurrent fetches share the read. A corrupt one is removed."""
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
                    self._store.delete(key)
            if record is not None:
                self._recent[key] = record
            return record

    def _pause(self) -> None:
        self._paused_until = self._clock() + PAUSE_S


def segments_of(
    wanted: Wanted,
    found: Sequence[tuple[int, _Listed]],
    get: Callable[[str], SegmentRecord | None],
    min_tokens: int,
) -> Iterator[SegmentRecord]:
    """Yield the segments that continue what the tree has of a prompt, in the order of its path.

    ``found``: segments near the prompt, each with the number of tokens that its path shares with the prompt. Each
    segment reaches farthest of those that begin where the last one ended, and at least ``min_tokens`` beyond it.
    """
    compressed, cached = wanted.compressed, wanted.cached
    while True:
        best, longest = None, cached + min_tokens - 1
        for overlap, entry in islice(_candidates(found, compressed), MAX_TRIES):
            if overlap <= longest:
                break
            record = get(entry.key)
            if record is None:
                continue
            same = common_length(wanted.tokens, record.tokens.tolist())
            if same > longest and _pays(entry, same, compressed):
                best, longest = record, same
        if best is None:
            return
        yield best
        if longest < best.end:
            return  # the prompt diverges inside this one
        compressed = cached = longest


def _candidates(found: Sequence[tuple[int, _Listed]], start: int) -> Iterator[tuple[int, _Listed]]:
    """Segments that continue at position ``start``, longest match first.

    A splittable segment may begin earlier: its entries before ``start`` are cut off.
    """
    begun = [each for each in found if each[1].start == start or (each[1].splittable and each[1].start < start)]
    for overlap, entry in sorted(begun, key=lambda each: (-each[0], -each[1].start)):
        if _pays(entry, overlap, start):
            yield overlap, entry


def _pays(entry: _Listed, same: int, start: int) -> bool:
    """Whether a segment is worth reading for a prompt that matches it up to position ``same``."""
    return same == entry.end or (entry.splittable and same - start >= MIN_USED * (entry.end - entry.start))


def common_length(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Number of equal tokens at the beginning of two sequences."""
    return sum(takewhile(bool, map(eq, ours, theirs)))
