"""One request's failure stays that request's failure; an error of accounting stops the server.

SGLang calls our hooks on its scheduler's thread and does not catch what they raise: any exception would end the server.
So each place that serves one request, job or listener runs under a :class:`Guard`: an exception there ends only that
one's work, is counted and logged, and the scheduler goes on. Where slots, spans
and rows change hands, going on after an error would give one user's keys to another: :class:`accounting` makes every
exception an :class:`InvariantError`, which no guard holds.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from contextlib import ContextDecorator, contextmanager
from enum import Enum
from types import TracebackType

from sgl_kvevict.errors import InvariantError, cut

logger = logging.getLogger(__name__)

MAX_TRACE_CHARS = 8000


class Place(Enum):
    """Where an error is held, and what follows for the request, job or listener."""

    OPTIONS = "options"
    """What a request asks of the cache is checked: the request is refused with status 500."""
    PROMPT = "prompt"
    """A completed prompt is counted as a reader, or becomes a job: it is not."""
    PASS = "pass"
    """A scoring pass is laid out and handed to the scheduler: its job ends as "failed"."""
    OBSERVATION = "observation"
    """Queries of a prompt, a vote or a pass are recorded: what was observed is thrown away."""
    COMPRESSION = "compression"
    """A policy decides what to keep: the range stays uncompressed."""
    FIT = "fit"
    """Values and biases are fitted: the segment stays as it was selected."""
    STORE = "store"
    """A prefix is handed to the store, looked for in it, or taken from it: it is not stored, or computed."""
    RELEASE = "release"
    """A request has let go of its path, and its job, or ranges that waited for it, go on: they wait on."""
    LISTENER = "listener"
    """Metrics are written, events queued, questions answered: this one is not."""
    SOCKETS = "sockets"
    """The event thread sends and receives: this message is lost."""
    STATE = "state"
    """``GET /server_info`` shows the cache: what failed is missing."""


PER_RANK = frozenset({Place.OBSERVATION, Place.COMPRESSION, Place.FIT})
"""Places that compute with one rank's own heads: an error on one rank is not one on the others."""


class Guard:
    """Holds, counts and logs exceptions.

    Args:
        num_ranks: tensor-parallel ranks. With more than one, an exception at one of ``PER_RANK`` is an
            :class:`InvariantError`: the other ranks would go on with another tree.

    Attributes:
        errors: exceptions held since the start, by place.
    """

    def __init__(self, num_ranks: int = 1) -> None:
        self.num_ranks = num_ranks
        self.errors = dict.fromkeys(Place, 0)

    def at(self, place: Place) -> Attempt:
        """Return a context in which exceptions other than :class:`InvariantError` end only the block.

        ``with guard.at(place) as attempt: ...`` is followed by ``if attempt.failed: ...``; nothing returns inside.
        """
        return Attempt(self, place)

    @contextmanager
    def on_one_rank(self) -> Iterator[None]:
        """Return a context for what is computed with one rank's own heads where an error is not a rank's own matter.

        With several ranks an exception in it is an :class:`InvariantError`: the others would go on.
        """
        try:
            yield
        except Exception as error:
            if self.num_ranks == 1 or isinstance(error, InvariantError):
                raise
            raise InvariantError("one rank's computation failed; the others go on with another tree") from error

    def held(self, place: Place, error: Exception) -> None:
        """Count an exception; the first one of a place is logged with its trace."""
        self.errors[place] += 1
        if self.errors[place] == 1:
            trace = "".join(traceback.format_tb(error.__traceback__))[-MAX_TRACE_CHARS:]
            logger.error(
                "kvevict: an error at %r was held, the server goes on; further ones there are only counted.\n%s%s: %s",
                place.value,
                trace,
                type(error).__name__,
                cut(str(error)),
            )


class Attempt:
    """The context that :meth:`Guard.at` returns.

    Attributes:
        failed: the block ended with an exception.
    """

    __slots__ = ("_guard", "_place", "failed")

    def __init__(self, guard: Guard, place: Place) -> None:
        self._guard = guard
        self._place = place
        self.failed = False

    def __enter__(self) -> Attempt:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception) or isinstance(error, InvariantError):
            return False
        self.failed = True
        self._guard.held(self._place, error)
        if self._guard.num_ranks > 1 and self._place in PER_RANK:
            raise InvariantError(
                f"one rank's {self._place.value} failed; the others go on with another tree"
            ) from error
        return True


class accounting(ContextDecorator):
    """A block, or a function, in which slots, spans or rows change hands: any exception is an error of accounting.

    Raises:
        InvariantError: the block raised something else.
    """

    def __enter__(self) -> accounting:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and not isinstance(error, InvariantError):
            raise InvariantError(f"accounting was interrupted by {type(error).__name__}: {cut(str(error))}") from error
