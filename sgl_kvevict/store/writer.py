"""Write behind: segments are written to a store by a thread of its own; what comes too fast is dropped."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock

from sgl_kvevict.errors import StoreError
from sgl_kvevict.store.identity import Namespace
from sgl_kvevict.store.segment_file import SegmentRecord
from sgl_kvevict.store.segments import SegmentStore
from sgl_kvevict.store.workers import Workers

MAX_WAITING = 64
"""Segments that wait to be written."""
MAX_WAITING_BYTES = 512 * 1024 * 1024
"""Of keys and values that wait."""


@dataclass(frozen=True)
class Written:
    """What became of a segment.

    Attributes:
        key: its name.
        num_tokens: tokens that it stands for.
        num_bytes: bytes written; 0: the store had it already.
        error: why it was not written; None: it was.
    """

    key: str
    num_tokens: int
    num_bytes: int
    error: str | None = None


class WriteBehind:
    """Hands segments to one thread.

    Args:
        store: where they go.
        max_bytes: of keys and values that may wait; a single segment may be larger.

    Attributes:
        num_dropped: segments that were not taken because too many waited.
        done: what became of the others, for whoever reports it.
    """

    def __init__(self, store: SegmentStore, max_bytes: int = MAX_WAITING_BYTES) -> None:
        self.num_dropped = 0
        self.done: deque[Written] = deque(maxlen=10_000)
        self._store = store
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._lock = Lock()
        self._workers = Workers("kvevict-store-write", 1, MAX_WAITING)

    @property
    def num_waiting(self) -> int:
        """Segments that wait, or are being written."""
        return self._workers.num_waiting

    def has_room(self, num_bytes: int) -> bool:
        """Whether a segment of that size would be taken now; if not, it counts as dropped."""
        waiting = self._num_bytes
        if self._workers.is_full or (waiting and waiting + num_bytes > self._max_bytes):
            self.num_dropped += 1
            return False
        return True

    def write(self, record: Callable[[], SegmentRecord], namespace: Namespace, num_bytes: int) -> bool:
        """Have a segment written.

        Args:
            record: returns it, when the thread calls.
            namespace: whose it is.
            num_bytes: of its keys and values.

        Returns:
            False: too many wait, it is dropped.
        """
        with self._lock:
            self._num_bytes += num_bytes
        if self._workers.submit(lambda: self._write(record, namespace, num_bytes)):
            return True
        with self._lock:
            self._num_bytes -= num_bytes
        self.num_dropped += 1
        return False

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything is written; False: it took too long."""
        return self._workers.drain(timeout_s)

    def _write(self, make: Callable[[], SegmentRecord], namespace: Namespace, num_bytes: int) -> None:
        try:
            record = make()
            num_tokens = record.end - record.start
            try:
                self.done.append(Written(record.key, num_tokens, self._store.put(record, namespace)))
            except StoreError as error:
                self.done.append(Written(record.key, num_tokens, 0, str(error)))
        finally:
            with self._lock:
                self._num_bytes -= num_bytes
