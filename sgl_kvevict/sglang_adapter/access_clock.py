"""Converts SGLang's access counter (a node's ``last_access_time``) to seconds."""

from __future__ import annotations

import time
from bisect import bisect_right

from sglang.srt.mem_cache.unified_cache.components import get_and_increase_time_counter

STEP_S = 0.1
"""Minimum time between two readings."""
MAX_READINGS = 2048
"""Beyond this, every second reading of the older half is deleted, so old ages become less precise."""


def access_counter() -> float:
    """Return the next access number; increments SGLang's counter."""
    return float(get_and_increase_time_counter())


class AccessClock:
    """Records (counter, time) readings and interpolates between them."""

    def __init__(self) -> None:
        self._counts = [access_counter()]
        self._seconds = [time.monotonic()]

    def tick(self) -> None:
        """Take a reading if the last one is older than ``STEP_S``; called between two steps."""
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
        """Seconds since the access with this number, interpolated between the readings around it."""
        now = time.monotonic()
        after = bisect_right(self._counts, accessed)
        if after == 0:
            return now - self._seconds[0]
        is_newest = after == len(self._counts)
        count, seconds = (access_counter(), now) if is_newest else (self._counts[after], self._seconds[after])
        first_count, first_seconds = self._counts[after - 1], self._seconds[after - 1]
        part = (float(accessed) - first_count) / max(count - first_count, 1.0)
        return now - (first_seconds + part * (seconds - first_seconds))
