"""How much of a server's work passes may take while users' requests are there: from counts, never from a clock."""

from __future__ import annotations

import math

BUSY_TOKENS = 128
"""Tokens of the prefix that a pass repeats while users are there, and the first time after they left."""


class Pacing:
    """Says when the next pass may start, and how long it may be.

    A pass delays all running requests by its own duration. Beside users it is short, and only the given share of the
    decode steps has one before it: below 1 %, the 99th percentile of the time between two tokens does not see them.
    Prefills of users are not counted: they are part of the time between two tokens, and the more requests there are
    the more of them lie between two decode steps, and so between two passes.

    Clients that answer each other without a pause leave gaps of a few milliseconds without any user. Such a gap
    counts as being beside users, or passes would fall into every one of them and delay whoever comes next. Once the
    scheduler has made ``quiet_turns`` turns without a user, passes follow each other, each twice as long as the one
    before, up to the configured length: the next request waits about as long as the server was idle at most.

    Args:
        share: of the steps, that passes of ``BUSY_TOKENS`` may take beside users, in (0, 1].
        longest: tokens of the prefix that a pass repeats at most.
    """

    def __init__(self, share: float, longest: int) -> None:
        self._share = share
        self._longest = longest
        self._num_tokens = BUSY_TOKENS
        self._steps = self._pause(BUSY_TOKENS)
        self._turns = 0

    def step(self, num_users: int, *, is_counted: bool = True, quiet_turns: int = 0) -> int:
        """A step begins in which no pass is under way, or a turn of the scheduler that has nothing to do.

        Args:
            num_users: users' requests that wait or run.
            is_counted: the step before was not a prefill that running requests waited for.
            quiet_turns: turns without users that come before the server counts as idle.

        Returns:
            Tokens that a pass may repeat now; 0: it is too early for one.
        """
        self._turns = self._turns + 1 if num_users == 0 else 0
        if self._turns > quiet_turns:
            self._steps = self._pause(BUSY_TOKENS)
            return min(self._num_tokens, self._longest)
        self._num_tokens = BUSY_TOKENS
        if self._steps > 0:
            self._steps -= is_counted and num_users > 0
            return 0
        return min(BUSY_TOKENS, self._longest)

    def started(self, num_tokens: int) -> None:
        """A pass starts that appends so many tokens to its prefix."""
        self._num_tokens = min(2 * self._num_tokens, self._longest)
        self._steps = self._pause(num_tokens)

    def _pause(self, num_tokens: int) -> int:
        """Steps that follow a pass of so many tokens before the next one."""
        return math.ceil((1 / self._share - 1) * max(num_tokens / BUSY_TOKENS, 1))
