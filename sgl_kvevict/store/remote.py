"""A URL that fsspec reaches as a store: buckets of S3, Google and Azure, or memory."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any, ClassVar

from sgl_kvevict.errors import ConfigError, StoreError
from sgl_kvevict.store.backend import SMALL_BYTES, Backend, Item


class RemoteBackend(Backend):
    """Objects below a URL, ``PROTOCOL://...``.

    Writes of an object are atomic if the service promises it (S3 does). Size limit and expiry are set in the service
    (life-cycle rules).

    ConfigError: fsspec, or its package for this protocol, is not installed; or the URL is not valid for it.
    """

    _failures: ClassVar[tuple[type[Exception], ...]] = (Exception,)
    """Each client library has its own exceptions."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        try:
            from fsspec.core import url_to_fs
        except ImportError as error:
            raise ConfigError(f"store: got {url!r}, which needs the package fsspec; install it") from error
        try:
            self._files, root = url_to_fs(url)
        except ImportError as error:
            raise ConfigError(f"store: got {url!r}, but fsspec lacks a package for this protocol: {error}") from error
        except (ValueError, OSError, TypeError) as error:
            raise ConfigError(f"store: got {url!r}: {error}") from error
        self._root = root.rstrip("/")

    def _put(self, name: str, data: bytes) -> None:
        self._files.pipe_file(f"{self._root}/{name}", data)

    def _get(self, name: str, limit: int | None) -> bytes | None:
        try:
            return bytes(self._files.cat_file(f"{self._root}/{name}", end=limit))
        except FileNotFoundError:
            return None

    def _get_many(self, names: Sequence[str]) -> dict[str, bytes]:
        """All at once, if the client library can."""
        paths = {f"{self._root}/{name}": name for name in names}
        if not paths:
            return {}
        found: dict[str, bytes] = {}
        # Errors are returned: one missing name would else end the call for all.
        for path, data in self._files.cat(list(paths), on_error="return", end=SMALL_BYTES).items():
            if isinstance(data, FileNotFoundError):
                continue
            if isinstance(data, Exception):
                raise data
            found[paths[path]] = bytes(data)
        return found

    def _exists(self, name: str) -> bool:
        # fsspec keeps listings; other servers write and remove meanwhile.
        self._files.invalidate_cache()
        return bool(self._files.exists(f"{self._root}/{name}"))

    def _delete(self, name: str) -> bool:
        # S3 reports success for an object that never was.
        if not self._exists(name):
            return False
        self._files.rm_file(f"{self._root}/{name}")
        return True

    def _list(self, prefix: str) -> Iterator[Item]:
        self._files.invalidate_cache()
        found: dict[str, dict[str, Any]] = self._files.find(f"{self._root}/{prefix}", detail=True)
        # An empty store has a root; without one the URL is wrong.
        if not found and not self._files.exists(self._root):
            raise StoreError(f"store {self.url!r}: nothing is there")
        for path, info in found.items():
            yield Item(path[len(self._root) + 1 :], int(info.get("size") or 0), _time_of(info))


def _time_of(info: dict[str, Any]) -> float:
    """When an object was written, if the service reports it; else now."""
    for field in ("LastModified", "mtime", "created", "updated"):
        value = info.get(field)
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, datetime):
            return value.timestamp()
    return time.time()
