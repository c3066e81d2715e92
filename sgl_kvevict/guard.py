"""Error handling: an error of one request ends that request's work, an error of accounting stops the server.

SGLang does not catch exceptions of our hooks on its scheduler's thread. :class:`Guard` limits one to a request. Where
slots, spans and rows change hands, going on could give one user's keys to another. There :class:`accounting` makes
every exception an :class:`InvariantError`, which no guard holds.
"""

from __future__ import annotations

import logging
import traceback
from contextlib import ContextDecorator
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType

from sgl_kvevict.errors import InvariantError, cut

logger = logging.getLogger(__name__)

MAX_TRACE_CHARS = 8000


class Place(StrEnum):
    """Where an error is held; each member says what is done there, and what follows from an error."""

    OPTIONS = "options"
    """Checking a request's options: the request is refused with status 500."""
    PROMPT = "prompt"
    """Compressing a completed prompt: it stays uncompressed."""
    OBSERVATION = "observation"
    """Recording queries of a prompt: the observation is discarded."""
    COMPRESSION = "compression"
    """Selecting entries by a policy: the range stays uncompressed."""
    STORE = "store"
    """Saving a prefix, or finding it in the store: it is not stored, or is computed."""
    HOST = "host"
    """Moving a prefix to the host's memory, or one from outside the pool into it: it is dropped, or is computed."""
    RELEASE = "release"
    """Continuing pending ranges after a request was released: they keep waiting."""
    MONITORING = "monitoring"
    """Writing metrics, answering a question: this time it is skipped."""
    SOCKETS = "sockets"
    """Sending and receiving on the thread of the event socket: this message is lost."""
    STATE = "state"
    """Showing the cache in ``GET /server_info``: the failed part is missing."""


PER_RANK = frozenset({Place.OBSERVATION, Place.COMPRESSION, Place.HOST})
"""Places that compute with one rank's own heads, or memory, so that an error may occur on one rank only."""


class Guard:
    """Holds, counts and logs exceptions; ``errors``: their number by place; ``attempts``: blocks begun, by place.

    With several tensor-parallel ranks, an exception at one of ``PER_RANK`` is an :class:`InvariantError`: the other
    ranks would go on with another tree.
    """

    def __init__(self, num_ranks: int = 1) -> None:
        self.num_ranks = num_ranks
        self.errors = dict.fromkeys(Place, 0)
        self.attempts = dict.fromkeys(Place, 0)

    def at(self, place: Place) -> Attempt:
        """Return a context in which exceptions other than :class:`InvariantError` end only the block.

        ``with guard.at(place) as attempt: ...`` is followed by ``if attempt.failed: ...``; nothing returns inside.
        """
        return Attempt(self, place)

    def held(self, place: Place, error: Exception) -> None:
        """Count an exception; log the 1st (with its trace), 10th, 100th, .. one of each place."""
        self.errors[place] += 1
        count = self.errors[place]
        if count == 1:
            trace = "".join(traceback.format_tb(error.__traceback__))[-MAX_TRACE_CHARS:]
        elif str(count).strip("0") == "1":  # a power of ten
            trace = ""
        else:
            return
        logger.error(
            "kvevict: %d of %d attempts at %r failed, the server goes on; the next logged error there is number %d.\n"
            "%s%s: %s",
            count,
            self.attempts[place],
            place.value,
            10 * count,
            trace,
            type(error).__name__,
            cut(str(error)),
        )


@dataclass
class Attempt:
    """The context that :meth:`Guard.at` returns; ``failed``: the block ended with an exception."""

    _guard: Guard
    _place: Place
    failed: bool = False

    def __enter__(self) -> Attempt:
        self._guard.attempts[self._place] += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        # KeyboardInterrupt and SystemExit end the process; broken accounting has to.
        if not isinstance(error, Exception) or isinstance(error, InvariantError):
            return False
        self.failed = True
        self._guard.held(self._place, error)
        if self._guard.num_ranks > 1 and self._place in PER_RANK:
            # Raised after it was logged: the log is the only place that has the trace.
            raise InvariantError(
                f"one rank's {self._place.value} failed; the others go on with another tree"
            ) from error
        return True


class accounting(ContextDecorator):
    """A block or function in which slots, spans or rows change hands; exceptions become :class:`InvariantError`."""

    def __enter__(self) -> accounting:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and not isinstance(error, InvariantError):
            raise InvariantError(f"accounting was interrupted by {type(error).__name__}: {cut(str(error))}") from error
