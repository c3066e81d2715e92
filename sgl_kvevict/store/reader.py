"""Read ahead: what a store knows of a prompt is fetched by other threads while the prompt's request waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from threading import Lock
from weakref import WeakValueDictionary

from sgl_kvevict.errors import CorruptSegmentError, StoreError
from sgl_kvevict.store.identity import Namespace
from sgl_kvevict.store.manifest import ManifestEntry
from sgl_kvevict.store.segment_file import SegmentRecord
from sgl_kvevict.store.segments import SegmentStore
from sgl_kvevict.store.workers import Workers

NUM_THREADS = 4
MAX_WAITING = 64
"""Fetches that wait for a thread; further requests go on without."""
MAX_SEGMENTS = 8
"""Of one prompt that are fetched one after the other."""
MAX_TRIES = 8
"""Segments that are read in order to find the one that agrees farthest: blocks' hashes leave open less than a block."""
MIN_USED = 0.5
"""Share of a segment's tokens that a prompt must agree with, so that fetching all of it pays."""
PAUSE_S = 5.0
"""After an error of the store, or when it gave nothing for as long as a request waits, requests go on without it for
so long."""


@dataclass(frozen=True)
class Wanted:
    """What a prompt looks for.

    Attributes:
        tokens: those that may be found in a cache.
        namespace: whose prompt it is.
        compressed: tokens of it that the tree holds in spans.
        cached: tokens of it that the tree holds.
    """

    tokens: Sequence[int]
    namespace: Namespace
    compressed: int
    cached: int


@dataclass(eq=False)
class Fetch:
    """A fetch under way.

    Attributes:
        wanted: by whom it was started.
        deadline: when it is too late (``time.monotonic``).
        records: what was found, in the order of the path; complete when ``is_done``.
        errors: what went wrong, if something did.
        is_done: nothing more comes.
        is_abandoned: nobody waits any more.
    """

    wanted: Wanted
    deadline: float
    records: list[SegmentRecord] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    is_done: bool = False
    is_abandoned: bool = False


class ReadAhead:
    """Fetches what a store knows of prompts.

    Args:
        store: where to look.
        wait_s: longest time that a request waits (seconds).
        clock: counts seconds.

    Attributes:
        num_skipped: prompts that were not looked for, because the store was in trouble or too many waited.
    """

    def __init__(self, store: SegmentStore, wait_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_skipped = 0
        self._store = store
        self._wait_s = wait_s
        self._clock = clock
        self._paused_until = float("-inf")
        self._last_given = float("-inf")
        self._workers = Workers("kvevict-store-read", NUM_THREADS, MAX_WAITING)
        self._recent: WeakValueDictionary[str, SegmentRecord] = WeakValueDictionary()
        self._locks = [Lock() for _ in range(4 * NUM_THREADS)]

    @property
    def min_prefix_tokens(self) -> int:
        """Tokens that a fetch must win at least, and by which a prompt is looked up."""
        return self._store.identity.min_prefix_tokens

    def deadline(self) -> float:
        """When who begins to wait now has waited long enough."""
        return self._clock() + self._wait_s

    def has_passed(self, deadline: float) -> bool:
        """Whether somebody has waited long enough."""
        return self._clock() >= deadline

    def start(self, wanted: Wanted) -> Fetch | None:
        """Begin to fetch; None: there is nothing to hope for, or the store is in trouble."""
        if len(wanted.tokens) - wanted.cached < self.min_prefix_tokens:
            return None
        fetch = Fetch(wanted, self.deadline())
        if self.has_passed(self._paused_until) and self._workers.submit(lambda: self._run(fetch)):
            return fetch
        self.num_skipped += 1
        return None

    def is_late(self, fetch: Fetch) -> bool:
        """Whether nobody should wait for a fetch any more; then it is abandoned.

        If the store gave nothing to anybody meanwhile, it has a pause.
        """
        now = self._clock()
        if fetch.is_done or now < fetch.deadline:
            return False
        self.abandon(fetch)
        if now - self._last_given >= self._wait_s:
            self._pause()
        return True

    def abandon(self, fetch: Fetch) -> None:
        """Nobody wants it any more."""
        fetch.is_abandoned = True

    # ---- in a thread ------------------------------------------------------------------------------------------

    def _run(self, fetch: Fetch) -> None:
        try:
            if not fetch.is_abandoned:
                self._fetch(fetch)
                self._last_given = self._clock()
        except StoreError as error:
            fetch.errors.append(str(error))
            if not isinstance(error, CorruptSegmentError):
                self._pause()
        finally:
            fetch.is_done = True

    def _fetch(self, fetch: Fetch) -> None:
        wanted = fetch.wanted
        entries = self._store.find(wanted.tokens, wanted.namespace)
        if not entries:
            return
        chain = wanted.namespace.chain(wanted.tokens)
        compressed, cached = wanted.compressed, wanted.cached
        for _ in range(MAX_SEGMENTS):
            record = self._best(fetch, entries, chain, compressed, cached)
            if record is None or fetch.is_abandoned:
                return
            fetch.records.append(record)
            compressed = cached = common_length(wanted.tokens, record.tokens.tolist())
            if compressed < record.end:
                return  # the prompt leaves this one in the middle

    def _best(
        self, fetch: Fetch, entries: Sequence[ManifestEntry], chain: Sequence[bytes], compressed: int, cached: int
    ) -> SegmentRecord | None:
        """The segment that goes farthest beyond what is cached, of those that begin where the tree can take them."""
        best, longest = None, cached + self.min_prefix_tokens - 1
        candidates = self._candidates(fetch.wanted, entries, chain, compressed)
        for overlap, entry in islice(candidates, MAX_TRIES):
            if overlap <= longest:
                break
            record = self._get(fetch, entry.key)
            if record is None:
                continue
            same = common_length(fetch.wanted.tokens, record.tokens.tolist())
            if same > longest and _pays(entry, same, compressed):
                best, longest = record, same
        return best

    def _candidates(
        self, wanted: Wanted, entries: Sequence[ManifestEntry], chain: Sequence[bytes], start: int
    ) -> Iterator[tuple[int, ManifestEntry]]:
        """Entries that go on from a position, and how far the prompt agrees with them, the farthest first.

        One that begins before the position has its first entries cut off, if it can be cut.
        """
        begun = (entry for entry in entries if entry.start == start or (entry.splittable and entry.start < start))
        found = [(entry.overlap(chain, len(wanted.tokens)), entry) for entry in begun]
        for overlap, entry in sorted(found, key=lambda each: (-each[0], -each[1].start)):
            if _pays(entry, overlap, start):
                yield overlap, entry

    def _get(self, fetch: Fetch, key: str) -> SegmentRecord | None:
        """Read a segment; requests that want the same at the same time share it. What is corrupt is removed."""
        with self._locks[int(key[:8], 16) % len(self._locks)]:
            record = self._recent.get(key)
            if record is not None:
                return record
            try:
                record = self._store.get(key)
            except CorruptSegmentError as error:
                fetch.errors.append(f"{key}: {error}")
                with suppress(StoreError):  # a store that can only be read
                    self._store.delete(key)
                return None
            if record is not None:
                self._recent[key] = record
            return record

    def _pause(self) -> None:
        self._paused_until = self._clock() + PAUSE_S


def _pays(entry: ManifestEntry, same: int, start: int) -> bool:
    """Whether a segment is worth reading for a prompt that agrees with it up to a position."""
    return same == entry.end or (entry.splittable and same - start >= MIN_USED * (entry.end - entry.start))


def common_length(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Tokens that two sequences begin with alike."""
    length = min(len(ours), len(theirs))
    if list(ours[:length]) == list(theirs[:length]):
        return length
    return next(i for i in range(length) if ours[i] != theirs[i])
