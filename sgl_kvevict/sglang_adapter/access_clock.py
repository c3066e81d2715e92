"""Seconds for SGLang's logical clock: its tree numbers accesses, and people ask how long ago they were."""

from __future__ import annotations

import time
from bisect import bisect_right

from sglang.srt.mem_cache.unified_cache.components import get_and_increase_time_counter

STEP_S = 0.1
"""Readings are at least this far apart."""
MAX_READINGS = 2048
"""When there are more, every second one of the older half is forgotten: what is long ago is told less exactly."""


def access_counter() -> float:
    """Return the number of the next access, which is counted as one."""
    return float(get_and_increase_time_counter())


class AccessClock:
    """Remembers when SGLang's counter of accesses stood where."""

    def __init__(self) -> None:
        self._counts = [access_counter()]
        self._seconds = [time.monotonic()]

    def tick(self) -> None:
        """Take a reading if the last one is old enough; called between two steps."""
        now = time.monotonic()
        if now - self._seconds[-1] < STEP_S:
            return
        self._counts.append(access_counter())
        self._seconds.append(now)
        if len(self._counts) > MAX_READINGS:
            older = MAX_READINGS // 2
            self._counts[:older] = self._counts[:older:2]
            self._seconds[:older] = self._seconds[:older:2]

    def age(self, accessed: float) -> float:
        """Seconds since an access, interpolated between the readings around it.

        Args:
            accessed: its number, a node's ``last_access_time``.
        """
        now = time.monotonic()
        after = bisect_right(self._counts, accessed)
        if after == 0:
            return now - self._seconds[0]
        is_newest = after == len(self._counts)
        count, seconds = (access_counter(), now) if is_newest else (self._counts[after], self._seconds[after])
        first_count, first_seconds = self._counts[after - 1], self._seconds[after - 1]
        part = (float(accessed) - first_count) / max(count - first_count, 1.0)
        return now - (first_seconds + part * (seconds - first_seconds))
