"""Limits the share of scoring passes in a server's work, by counts of steps, never by a clock."""

from __future__ import annotations

import math

BUSY_TOKENS = 128
"""Tokens of the prefix that a pass repeats beside users' requests; also the first pass after the last of them."""


class Pacing:
    """Decides when the next pass may start, and how long it may be.

    A pass delays all running requests by its own duration. Beside users it is short, and at most ``share`` of the
    decode steps has one before it: below 1 %, the 99th percentile of the time between two tokens does not include
    passes. Users' prefills are not counted: they are part of the time between two tokens, and their number between two
    decode steps, and so between two passes, grows with the load.

    Clients that answer each other without a pause leave gaps of a few milliseconds without any user. Such a gap counts
    as being beside users, or a pass would start in each and delay the next request. After ``quiet_turns`` turns of the
    scheduler without a user, passes follow each other, each twice as long as the one before, up to ``longest`` tokens:
    the next request waits at most about as long as the server was idle.
    """

    def __init__(self, share: float, longest: int) -> None:
        self._share = share
        self._longest = longest
        self._num_tokens = BUSY_TOKENS
        self._steps = self._pause(BUSY_TOKENS)
        self._quiet: int | None = None
        """Turns that the server has been without a user for; None: it has some."""

    def step(self, num_users: int, *, is_counted: bool = True, num_turns: int = 1, quiet_turns: int = 0) -> int:
        """Note a step without a running pass, or an idle turn; return how many tokens a pass may repeat now (0: none).

        Args:
            num_users: users' requests that wait or run.
            is_counted: the step before was not a prefill that running requests waited for.
            num_turns: turns that have gone by since the one before; a scheduler that sleeps takes long ones.
            quiet_turns: turns without users before the server counts as idle.
        """
        if num_users > 0:
            self._quiet = None
        else:
            self._quiet = 0 if self._quiet is None else self._quiet + num_turns
        if self._quiet is not None and self._quiet >= quiet_turns:
            self._steps = self._pause(BUSY_TOKENS)
            return min(self._num_tokens, self._longest)
        self._num_tokens = BUSY_TOKENS
        if self._steps > 0:
            self._steps -= is_counted and num_users > 0
            return 0
        return min(BUSY_TOKENS, self._longest)

    def started(self, num_tokens: int) -> None:
        """A pass of ``num_tokens`` appended tokens starts."""
        self._num_tokens = min(2 * self._num_tokens, self._longest)
        self._steps = self._pause(num_tokens)

    def _pause(self, num_tokens: int) -> int:
        """Steps between a pass of ``num_tokens`` tokens and the next one."""
        return math.ceil((1 / self._share - 1) * max(num_tokens / BUSY_TOKENS, 1))
