"""A thread pool with a bounded queue: the scheduler hands over work and never waits."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

logger = logging.getLogger(__name__)


class Workers:
    """A thread pool that refuses work when its queue is full. An exception of the work is logged.

    Args:
        name: of the threads.
        num_threads: size of the pool.
        max_waiting: pieces of work that may wait for a thread.
    """

    def __init__(self, name: str, num_threads: int, max_waiting: int) -> None:
        self._limit = num_threads + max_waiting
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._under_way: set[Future[None]] = set()

    @property
    def is_full(self) -> bool:
        """Whether :meth:`submit` would refuse work now."""
        return self.num_waiting >= self._limit

    @property
    def num_waiting(self) -> int:
        """Pieces of work that wait for a thread or are under way."""
        return sum(not future.done() for future in tuple(self._under_way))

    def submit(self, work: Callable[[], None]) -> bool:
        """Hand over work; False: the queue is full, and nothing was done."""
        if self.is_full:
            return False
        future = self._pool.submit(work)
        self._under_way.add(future)
        future.add_done_callback(self._ended)
        return True

    def drain(self, timeout_s: float) -> bool:
        """Wait until all work is done; False: it took longer than ``timeout_s`` seconds."""
        return not wait(tuple(self._under_way), timeout_s).not_done

    def close(self, timeout_s: float) -> int:
        """Wait until all work is done, cancel what still waits then, and return how much was not done."""
        left = wait(tuple(self._under_way), timeout_s).not_done
        self._pool.shutdown(wait=False, cancel_futures=True)
        return len(left)

    def _ended(self, future: Future[None]) -> None:
        self._under_way.discard(future)
        if not future.cancelled() and (error := future.exception()) is not None:
            logger.error("kvevict: a thread of the store failed", exc_info=error)
