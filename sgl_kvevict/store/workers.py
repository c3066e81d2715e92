"""Threads that do what may take long, beside the scheduler's."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Workers:
    """A few daemon threads and a bounded queue. Who hands over work never waits.

    Args:
        name: of the threads.
        num_threads: how many.
        max_waiting: pieces of work that may wait.
    """

    def __init__(self, name: str, num_threads: int, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._work: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._num_busy = 0
        for i in range(num_threads):
            threading.Thread(target=self._run, daemon=True, name=f"{name}-{i}").start()

    @property
    def is_full(self) -> bool:
        """Whether nothing more can be handed over now."""
        return len(self._work) >= self._max_waiting

    @property
    def num_waiting(self) -> int:
        """Pieces of work that wait, or are under way."""
        return len(self._work) + self._num_busy

    def submit(self, work: Callable[[], None]) -> bool:
        """Hand over work; False: the queue is full, and nothing happens."""
        with self._changed:
            if self.is_full:
                return False
            self._work.append(work)
            self._changed.notify()
        return True

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything is done; False: it took too long."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._work and not self._num_busy, timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._work))
                work = self._work.popleft()
                self._num_busy += 1
            try:
                work()
            except Exception:  # the work reports what it expects; a thread never ends
                logger.exception("kvevict: an error in %s was held", threading.current_thread().name)
            finally:
                del work
                with self._changed:
                    self._num_busy -= 1
                    self._changed.notify_all()
