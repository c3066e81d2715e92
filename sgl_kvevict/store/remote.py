"""Whatever fsspec reaches by URL as a store: S3 and its like, Google's and Azure's buckets, memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from sgl_kvevict.errors import ConfigError, StoreError
from sgl_kvevict.store.backend import Item, check_name, is_name, update_without_lock

UPDATE_TRIES = 3


class RemoteBackend:
    """Objects below a URL.

    Objects are written whole, so nobody sees half of one where the service promises that (S3 does). There is no lock:
    of two writers that change a manifest at once one may be lost, so who writes looks again, and repeats it. Size and
    age of what is stored are the service's business (life-cycle rules).

    Args:
        url: ``PROTOCOL://...``.

    Raises:
        ConfigError: fsspec, or what it needs for this protocol, is not installed; or the URL is none of its.
    """

    def __init__(self, url: str) -> None:
        try:
            from fsspec.core import url_to_fs
        except ImportError as error:
            raise ConfigError(f"store: got {url!r}, which needs the package fsspec; install it") from error
        options = {"auto_mkdir": True} if url.startswith(("file://", "local://")) else {}
        try:
            self._files, self._root = url_to_fs(url, **options)
        except ImportError as error:
            raise ConfigError(f"store: got {url!r}, but fsspec lacks what this protocol needs: {error}") from error
        except (ValueError, OSError, TypeError) as error:
            raise ConfigError(f"store: got {url!r}: {error}") from error
        self._url = url

    @property
    def url(self) -> str:
        """As it was given."""
        return self._url

    def put(self, name: str, data: bytes) -> None:
        """See :meth:`Backend.put`."""
        with self._errors("written"):
            self._files.pipe_file(self._path(name), data)

    def get(self, name: str) -> bytes | None:
        """See :meth:`Backend.get`."""
        with self._errors("read"):
            try:
                data = self._files.cat_file(self._path(name))
            except FileNotFoundError:
                return None
            return bytes(data)

    def exists(self, name: str) -> bool:
        """See :meth:`Backend.exists`."""
        with self._errors("read"):
            self._files.invalidate_cache()
            return bool(self._files.exists(self._path(name)))

    def delete(self, name: str) -> bool:
        """See :meth:`Backend.delete`."""
        with self._errors("changed"):
            if not self.exists(name):
                return False
            self._files.rm_file(self._path(name))
            return True

    def list(self, prefix: str = "") -> Iterator[Item]:
        """See :meth:`Backend.list`."""
        with self._errors("read"):
            self._files.invalidate_cache()
            found: dict[str, dict[str, Any]] = self._files.find(
                self._path(prefix) if prefix else self._root, detail=True
            )
        for path, info in found.items():
            name = path[len(self._root) :].lstrip("/")
            if is_name(name):
                yield Item(name, int(info.get("size") or 0), _time_of(info))

    def update(self, name: str, change: Callable[[bytes | None], bytes]) -> None:
        """See :meth:`Backend.update`."""
        update_without_lock(self, name, change, UPDATE_TRIES)

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{check_name(name)}"

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        """What a client library raises is its own affair: whatever it is, the store did not do what was asked."""
        try:
            yield
        except StoreError:
            raise
        except Exception as error:
            raise StoreError(f"store {self.url!r} cannot be {what}: {type(error).__name__}: {error}") from error


def _time_of(info: dict[str, Any]) -> float:
    """When an object was written, where the service says so."""
    for field in ("LastModified", "mtime", "created", "updated"):
        value = info.get(field)
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, datetime):
            return value.timestamp()
    return time.time()
