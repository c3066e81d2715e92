"""Interface of a store's back end (a file system, a bucket or a memory pool): bytes by name."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

from sgl_kvevict.errors import StoreError

SMALL_BYTES = 4096
"""Bytes that are read of a file of the index, which has fewer than 300."""
_NAME = re.compile(r"[0-9a-z][0-9a-z.-]*(/[0-9a-z][0-9a-z.-]*)*")
_LISTED = re.compile(r"v[0-9]+/[0-9a-f]{64}/.+")
"""A store's own items of any format: version, identity and the rest. What else its place has is never removed."""


@dataclass(frozen=True)
class Item:
    """A stored item: name, size in bytes, time of the last use (seconds since the epoch)."""

    name: str
    size: int
    used: float


class Backend(ABC):
    """A store: bytes by name. Names consist of small letters, digits, dots, hyphens, and slashes between parts.

    Methods may be called by several threads and processes at once. They raise ``StoreError`` when an item, or the whole
    store, cannot be read or written, and ``ValueError`` for a name that could lead out of it. ``url`` is for messages.
    """

    _failures: ClassVar[tuple[type[Exception], ...]] = (OSError,)
    """Exceptions of the private methods that become a ``StoreError``."""

    def __init__(self, url: str) -> None:
        self.url = url

    def create(self) -> None:
        """Create the folder, if the store is one; a service is contacted when it is first needed."""
        return

    def put(self, name: str, data: bytes) -> None:
        """Write an item or replace it; concurrent readers see the old bytes or the new ones, never a part."""
        with self._errors("written", check_name(name)):
            self._put(name, data)

    def get(self, name: str, limit: int | None = None) -> bytes | None:
        """Return the bytes of an item; None: there is no such item.

        Of an item of more than ``limit`` bytes (None: no limit) so many may be all that is read: it may be larger than
        the memory.
        """
        with self._errors("read", check_name(name)):
            return self._get(name, limit)

    def get_many(self, names: Sequence[str]) -> dict[str, bytes]:
        """Return those of some small items that exist, by name; of a large one at least its first ``SMALL_BYTES``."""
        with self._errors("read"):
            return self._get_many([check_name(name) for name in names])

    def exists(self, name: str) -> bool:
        """Whether there is an item of this name."""
        with self._errors("read", check_name(name)):
            return self._exists(name)

    def delete(self, name: str) -> bool:
        """Remove an item; False: there was none."""
        with self._errors("changed", check_name(name)):
            return self._delete(name)

    def list(self, prefix: str = "") -> Iterator[Item]:
        """Yield all items of the store below a folder, unordered; files of others are skipped."""
        if prefix:
            check_name(prefix)
        with self._errors("read"):
            for item in self._list(prefix):
                # A folder or bucket may hold other things, and what is listed here may be removed.
                if _LISTED.fullmatch(item.name) and _NAME.fullmatch(item.name):
                    yield item

    @contextmanager
    def _errors(self, what: str, name: str = "") -> Iterator[None]:
        try:
            yield
        # Its message is whole already, and where `_failures` is `Exception` it would be wrapped twice.
        except StoreError:
            raise
        except self._failures as error:
            of = f": {name}" if name else ""
            raise StoreError(f"store {self.url!r} cannot be {what}{of}: {type(error).__name__}: {error}") from error

    @abstractmethod
    def _put(self, name: str, data: bytes) -> None: ...

    @abstractmethod
    def _get(self, name: str, limit: int | None) -> bytes | None: ...

    def _get_many(self, names: Sequence[str]) -> dict[str, bytes]:
        return {name: data for name in names if (data := self._get(name, SMALL_BYTES)) is not None}

    @abstractmethod
    def _exists(self, name: str) -> bool: ...

    @abstractmethod
    def _delete(self, name: str) -> bool: ...

    @abstractmethod
    def _list(self, prefix: str) -> Iterator[Item]: ...


def check_name(name: str) -> str:
    """Return a name, or raise ``ValueError`` if it might lead out of a folder."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"not a name of a stored item: {name!r}")
    return name
