"""How much of a server's work passes may take while users' requests are there: from counts, never from a clock."""

from __future__ import annotations

import math

BUSY_TOKENS = 64
"""Tokens of the prefix that a pass repeats while users are there, and the first time after they left."""


class Pacing:
    """Says when the next pass may start, and how long it may be.

    Without users passes follow each other, each twice as long as the one before, up to what is configured: who comes
    next never waits much longer than the server was idle. Beside users passes are short, and the longer one was the
    more steps have to follow before the next.

    Args:
        share: of the steps, that passes of ``BUSY_TOKENS`` may take beside users, in (0, 1].
        longest: tokens of the prefix that a pass repeats at most.
    """

    def __init__(self, share: float, longest: int) -> None:
        self._share = share
        self._longest = longest
        self._num_tokens = BUSY_TOKENS
        self._steps = 0

    def step(self, num_users: int) -> int:
        """A step begins in which no pass is under way.

        Args:
            num_users: users' requests that wait or run.

        Returns:
            Tokens that a pass may repeat now; 0: it is too early for one.
        """
        if num_users == 0:
            self._steps = 0
        else:
            self._num_tokens = BUSY_TOKENS
        if self._steps > 0:
            self._steps -= 1
            return 0
        return min(self._num_tokens, self._longest)

    def started(self, num_tokens: int) -> None:
        """A pass starts that appends so many tokens to its prefix."""
        self._num_tokens = min(2 * self._num_tokens, self._longest)
        self._steps = math.ceil((1 / self._share - 1) * max(num_tokens / BUSY_TOKENS, 1))
