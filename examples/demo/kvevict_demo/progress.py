"""What happens, and how long it will still take."""

from __future__ import annotations

import time
from collections.abc import Callable


class Progress:
    """Prints one line for each step.

    What is left is estimated from the seconds that steps were expected to take: those still to come, times how much
    longer than expected the finished ones took.

    Args:
        write: prints a line.
        clock: seconds.
    """

    def __init__(self, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._write = write
        self._clock = clock
        self._started = clock()
        self._expected_s = 0.0
        self._begun_s = 0.0
        self._done_s = 0.0

    def expect(self, seconds: float) -> None:
        """Announce work, as seconds on two cores of a server."""
        self._expected_s += seconds

    def step(self, text: str, seconds: float = 0.0) -> None:
        """Begin a step that was announced to take so long; the one before has ended."""
        self._done_s += self._begun_s
        self._begun_s = seconds
        elapsed = self._clock() - self._started
        self._write(f"{elapsed:5.0f} s  {text}{self._left(elapsed)}")

    def note(self, text: str) -> None:
        """Tell something within a step."""
        self._write(f"{self._clock() - self._started:5.0f} s    {text}")

    def _left(self, elapsed: float) -> str:
        left = self._expected_s - self._done_s
        if left <= 0:
            return ""
        slowness = elapsed / self._done_s if self._done_s else 1.0
        return f"  (about {max(left * slowness, 1):.0f} s left)"
