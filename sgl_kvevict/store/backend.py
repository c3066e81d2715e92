"""Where bytes are kept under names: what a store asks of a file system, a bucket or a memory pool."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from sgl_kvevict.errors import StoreError

_NAME = re.compile(r"[0-9a-z][0-9a-z.-]*(/[0-9a-z][0-9a-z.-]*)*")


@dataclass(frozen=True)
class Item:
    """Something that is stored.

    Attributes:
        name: under which.
        size: bytes.
        used: when it was read or written last, as far as the back end knows (seconds since the epoch).
    """

    name: str
    size: int
    used: float


class Backend(Protocol):
    """Bytes by name. Names are made here: small letters, digits, dots, hyphens, slashes between parts.

    All methods may be called by several threads, and by several processes at once. All raise
    :class:`sgl_kvevict.errors.StoreError` when the place cannot be reached, read or written.
    """

    @property
    def url(self) -> str:
        """Where it is, for messages."""

    def put(self, name: str, data: bytes) -> None:
        """Write bytes under a name, in place of what was there; who reads meanwhile finds the one or the other."""

    def get(self, name: str) -> bytes | None:
        """Return the bytes under a name; None: there are none."""

    def exists(self, name: str) -> bool:
        """Whether there are bytes under a name."""

    def delete(self, name: str) -> bool:
        """Remove what is under a name; False: there was nothing."""

    def list(self, prefix: str = "") -> Iterator[Item]:
        """What is stored under names that begin with whole parts, in no particular order; others' files are not."""

    def update(self, name: str, change: Callable[[bytes | None], bytes]) -> None:
        """Replace what is under a name by what ``change`` makes of it; ``change`` may be called more than once."""


def update_without_lock(backend: Backend, name: str, change: Callable[[bytes | None], bytes], tries: int) -> None:
    """:meth:`Backend.update` where there is no lock: of two writers one may be lost, so who writes looks again.

    Args:
        backend: where.
        name: what is changed.
        change: makes the new bytes of the old ones.
        tries: how often it is done at most.

    Raises:
        StoreError: others were faster each time, or the place cannot be read or written.
    """
    for _ in range(tries):
        data = change(backend.get(name))
        backend.put(name, data)
        if backend.get(name) == data:
            return
    raise StoreError(f"store {backend.url!r}: {name} is changed by others all the time")


def is_name(name: str) -> bool:
    """Whether something can be stored under a name. What else lies in a place is somebody else's."""
    return _NAME.fullmatch(name) is not None


def check_name(name: str) -> str:
    """Return a name that cannot lead out of a folder.

    Raises:
        ValueError: it might.
    """
    if not is_name(name):
        raise ValueError(f"not a name of a stored item: {name!r}")
    return name
