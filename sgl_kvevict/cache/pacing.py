"""When the next scoring pass may start, and how long it may be, so that users hardly notice passes."""

from __future__ import annotations

import math

BUSY_TOKENS = 128
"""Tokens of the prefix that a pass repeats beside users' requests; also the first pass after the last of them."""
QUIET_S = 2.5
"""Seconds without a user before passes follow each other, at least: a client's next request comes within 2 s."""
MAX_QUIET_S = 60.0
"""The most that :attr:`Pacing.quiet_s` grows to; after a minute without a user a server is idle."""
REQUESTS_PER_DELAY = 40
"""In the long run one in so many arrivals on an idle server meets a pass, while pauses are below ``MAX_QUIET_S``."""
ASSUMED_PASS_S = 0.1
"""Seconds of a pass of ``BUSY_TOKENS``, before the first one was measured."""


class Pacing:
    """Decides when the next pass may start, and how long it may be.

    A running forward cannot be interrupted, so a request that arrives during a pass waits for its end, and a pass
    beside users delays all of them by its own duration.

    Beside users a pass is short, and all passes together take at most ``share`` of the time that users wait or run:
    after a pass of ``t`` seconds no other one starts for ``t * (1 / share - 1)`` such seconds. A request of ``d``
    seconds is slowed by more than a tenth only by a pass longer than ``d / 10``, and of these it meets one with a
    probability of less than ``10 * share``: below 5 % at the default, so the 95th percentile does not move. A gap
    between two users counts as being beside them.

    After ``quiet_s`` seconds without a user, passes follow each other, each twice as long as the one before, up to
    ``longest`` tokens: a request waits at most about as long as the server was idle. Clients may pause for longer than
    ``QUIET_S``; so an arrival that meets such a pass doubles ``quiet_s``, and each one that meets none shortens it
    a little, until one in ``REQUESTS_PER_DELAY`` arrivals meets one.

    Ranks of tensor parallelism count the same users in the same turns, but measure times of their own: the caller lets
    a pass start when all of them allow it.

    Attributes:
        quiet_s: seconds without a user before the server counts as idle.
    """

    def __init__(self, share: float, longest: int) -> None:
        self.quiet_s = QUIET_S
        self._pause_per_second = 1 / share - 1
        self._longest = longest
        self._num_tokens = BUSY_TOKENS
        self._pass_s = ASSUMED_PASS_S
        """Seconds that a pass of ``BUSY_TOKENS`` takes, as the last one showed."""
        self._busy_s = 0.0
        """Seconds with users since the last pass, or since the server was idle."""
        self._has_users = self._is_quiet = False
        self._last_turn = self._last_user = -math.inf
        self._running: tuple[float, int, bool] | None = None
        """Of the pass under way: when it started, its tokens, and whether the server was idle."""

    def turn(self, now: float, *, has_users: bool, has_pass: bool) -> int:
        """Note a turn of the scheduler; called in every turn, because users may come while a pass runs or none waits.

        Args:
            now: seconds of a monotonic clock.
            has_users: users' requests wait or run.
            has_pass: a pass waits or runs.

        Returns:
            Tokens that a pass may repeat now; 0: none may start.
        """
        if self._has_users:
            self._busy_s += now - self._last_turn
        if has_users and not self._has_users:
            self._arrived()
        if self._running is not None and not has_pass:
            self._ended(now)
        self._has_users, self._last_turn = has_users, now
        if has_users:
            self._last_user, self._num_tokens = now, BUSY_TOKENS
        self._is_quiet = now - self._last_user >= self.quiet_s
        if self._is_quiet:
            self._busy_s = 0.0
            return min(self._num_tokens, self._longest)
        return min(BUSY_TOKENS, self._longest) if self._busy_s >= self._pass_s * self._pause_per_second else 0

    def started(self, num_tokens: int) -> None:
        """A pass that may repeat ``num_tokens`` tokens starts in this turn."""
        self._running = (self._last_turn, num_tokens, self._is_quiet)
        self._num_tokens = 2 * num_tokens

    def withdrawn(self) -> None:
        """The pass that was started did not run, so its duration shows nothing."""
        self._running = None

    def _ended(self, now: float) -> None:
        """The pass under way ended: the next one beside users waits in proportion to its duration."""
        assert self._running is not None
        started, num_tokens, _ = self._running
        self._pass_s = (now - started) * min(BUSY_TOKENS / num_tokens, 1)
        self._running, self._busy_s = None, 0.0

    def _arrived(self) -> None:
        """Users come: passes wait for longer next time if these meet one, for a little less if they do not."""
        if self._running is not None and self._running[2]:
            self.quiet_s = min(2 * self.quiet_s, MAX_QUIET_S)
        else:
            self.quiet_s = max(self.quiet_s * 0.5 ** (1 / (REQUESTS_PER_DELAY - 1)), QUIET_S)
