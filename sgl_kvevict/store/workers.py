"""A thread pool with a bounded queue, so that the scheduler hands over work and never waits."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

logger = logging.getLogger(__name__)


class Workers:
    """A thread pool that refuses work when its queue is full. Exceptions of the work are logged.

    Work may wait in ``max_waiting`` pieces, and unfinished work may hold ``max_bytes``; a larger piece waits alone.
    """

    def __init__(self, name: str, num_threads: int, max_waiting: int, max_bytes: int = 0) -> None:
        self._limit = num_threads + max_waiting
        self._max_bytes = max_bytes
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._unfinished: dict[Future[None], int] = {}

    @property
    def num_waiting(self) -> int:
        """Pieces of work that wait or are under way."""
        return len(self._sizes())

    def takes(self, num_bytes: int = 0) -> bool:
        """Whether :meth:`submit` would take work now."""
        sizes = self._sizes()
        # Without this a piece beyond the limit could never be done at all.
        return len(sizes) < self._limit and (not any(sizes) or sum(sizes) + num_bytes <= self._max_bytes)

    def submit(self, work: Callable[[], None], num_bytes: int = 0) -> bool:
        """Hand over work that holds ``num_bytes``; False: the queue is full."""
        if not self.takes(num_bytes):
            return False
        future = self._pool.submit(work)
        self._unfinished[future] = num_bytes
        future.add_done_callback(self._ended)
        return True

    def close(self, timeout_s: float) -> int:
        """Wait until all work is done, then cancel what waits; return how many pieces were not done."""
        left = wait(self._unfinished.copy(), timeout_s).not_done
        # This wait was bounded; the one of `shutdown` is not, and a service that is down would hold it.
        self._pool.shutdown(wait=False, cancel_futures=True)
        return len(left)

    def _sizes(self) -> list[int]:
        # A copy, because threads remove entries meanwhile. One that is done may still be listed: its callback runs
        # later.
        return [size for future, size in self._unfinished.copy().items() if not future.done()]

    def _ended(self, future: Future[None]) -> None:
        self._unfinished.pop(future, None)
        # No caller asks these futures for a result, so an exception would vanish.
        if not future.cancelled() and (error := future.exception()) is not None:
            logger.error("kvevict: a thread of the store failed", exc_info=error)
