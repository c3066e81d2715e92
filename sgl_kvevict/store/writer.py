"""Write-behind: one thread writes segments to a store; segments that come too fast are dropped."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from sgl_kvevict.errors import StoreError
from sgl_kvevict.store.identity import Namespace
from sgl_kvevict.store.segment_file import SegmentRecord
from sgl_kvevict.store.segments import SegmentStore
from sgl_kvevict.store.workers import Workers

logger = logging.getLogger(__name__)

MAX_WAITING = 64
"""Segments that may wait for the thread."""
MAX_WAITING_BYTES = 512 * 1024 * 1024
"""Bytes of keys and values that may wait."""
LOG_EVERY_S = 60.0
"""Failed writes of each kind are logged once in this time."""


class WriteBehind(Workers):
    """Hands segments to one thread; a segment beyond ``max_bytes`` of keys and values waits alone.

    ``num_dropped``: segments not taken because too many waited. ``done``: results of the others, for the scheduler:
    bytes written; 0 if the store had the segment; None if it could not be written.
    """

    def __init__(
        self, store: SegmentStore, max_bytes: int = MAX_WAITING_BYTES, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__("kvevict-store-write", 1, MAX_WAITING, max_bytes)
        self.num_dropped = 0
        # Appended by the thread, popped by the scheduler; bounded in case nobody pops.
        self.done: deque[int | None] = deque(maxlen=10_000)
        self._store = store
        self._clock = clock
        self._next_log: dict[str, float] = {}

    def has_room(self, num_bytes: int) -> bool:
        """Whether a segment of this size would be taken now; if not, it is counted as dropped."""
        has_room = self.takes(num_bytes)
        self.num_dropped += not has_room
        return has_room

    def write(self, record: Callable[[], SegmentRecord], namespace: Namespace, num_bytes: int) -> bool:
        """Queue a segment of ``num_bytes`` of keys and values; the thread calls ``record`` for it. False: no room."""
        # `record` waits for a copy from the device, which the scheduler's thread must not.
        return self.submit(lambda: self._write(record(), namespace), num_bytes)

    def _write(self, record: SegmentRecord, namespace: Namespace) -> None:
        try:
            self.done.append(self._store.put(record, namespace))
        except StoreError as error:
            self.done.append(None)
            self._log(error)

    def _log(self, error: StoreError) -> None:
        cause = error.__cause__
        # A full disk fails with every segment: one line each would bury the log.
        kind = f"{type(cause).__name__} {getattr(cause, 'errno', None)}"
        now = self._clock()
        if now >= self._next_log.get(kind, now):
            self._next_log[kind] = now + LOG_EVERY_S
            logger.warning("kvevict: a prefix was not stored (the next such line in %.0f s): %s", LOG_EVERY_S, error)
