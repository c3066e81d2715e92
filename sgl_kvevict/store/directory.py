"""A folder as a store: atomic writes by rename, safe for many writers, limited in size."""

from __future__ import annotations

import errno
import os
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from stat import S_ISREG

from sgl_kvevict.errors import StoreError
from sgl_kvevict.store.backend import Backend, Item

SCRATCH = ".scratch"
SCRATCH_S = 3600.0
"""Unfinished files older than this are removed."""
SCAN_SHARE = 16
"""Each time this process has written 1/16 of the limit it measures the folder: other processes write, too."""
TRIM_TO = 0.9
"""Share of the limit that trimming leaves, so that not every write has to trim."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a place that has no room: the disk, or what its user may take of it."""


class DirectoryBackend(Backend):
    """Files below a folder, on a local or a shared file system; the first write creates it.

    A read sets the file's modification time. When the files exceed ``max_bytes`` (None: no limit), or the disk is full,
    the least recently used ones are removed. Several processes that remove at once remove the same ones.
    """

    def __init__(self, folder: Path, max_bytes: int | None = None) -> None:
        super().__init__(str(folder))
        self._folder = folder
        self._max_bytes = max_bytes
        self._thread_lock = threading.Lock()
        self._unmeasured = float("inf")
        """Bytes written since the folder was measured; the first write measures it."""

    def create(self) -> None:
        """Create the folder, if it is not there; only this user can read a new one."""
        with self._errors("made"):
            # Files hold the tokens of prompts.
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            (self._folder / SCRATCH).mkdir(exist_ok=True)

    def _put(self, name: str, data: bytes) -> None:
        # Trimming would remove everything else, and this item next.
        if self._max_bytes is not None and len(data) > self._max_bytes:
            raise StoreError(f"store {self.url!r}: an item of {len(data)} bytes; its limit is {self._max_bytes}")
        try:
            self._write(name, data)
        except OSError as error:
            # It raises the same error unless the disk is full; a second failure is then reported as it is.
            self._make_room(len(data), error)
            self._write(name, data)
        if self._max_bytes is not None and self._is_scan_due(len(data), self._max_bytes):
            self._trim(self._max_bytes)

    def _get(self, name: str, limit: int | None) -> bytes | None:
        path = self._folder / name
        try:
            status = path.stat()
            if not S_ISREG(status.st_mode):  # a pipe would be waited for, and a device has no end
                raise OSError(errno.EINVAL, "not a regular file")
            with path.open("rb") as file:
                # Not to the end: a file that grows meanwhile has none.
                data = file.read(status.st_size if limit is None else min(status.st_size, limit))
        except (FileNotFoundError, NotADirectoryError):
            self._require_folder()
            return None
        # The time of the last use is what `_trim` sorts by.
        with suppress(OSError):  # read-only, or removed since
            os.utime(path)
        return data

    def _exists(self, name: str) -> bool:
        return (self._folder / name).is_file()

    def _delete(self, name: str) -> bool:
        try:
            (self._folder / name).unlink()
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def _list(self, prefix: str) -> Iterator[Item]:
        # A share that is not mounted is a failure, and no look-up without a hit: reads shall pause.
        self._require_folder()
        for path in (self._folder / prefix).rglob("*"):
            with suppress(FileNotFoundError):  # removed since
                if path.is_file():
                    status = path.stat()
                    yield Item(path.relative_to(self._folder).as_posix(), status.st_size, status.st_mtime)

    def _require_folder(self) -> None:
        if not self._folder.is_dir():
            raise StoreError(f"store {self.url!r}: the folder is not there")

    def _write(self, name: str, data: bytes) -> None:
        # Each time, because the folder may be removed while the server runs.
        self.create()
        path, scratch = self._folder / name, self._folder / SCRATCH / uuid.uuid4().hex
        try:
            scratch.write_bytes(data)
            path.parent.mkdir(parents=True, exist_ok=True)
            # A rename within one file system is atomic, so the scratch folder lies inside the store. Readers see the
            # old bytes or the new ones.
            scratch.rename(path)
        finally:
            scratch.unlink(missing_ok=True)

    def _is_scan_due(self, num_bytes: int, max_bytes: int) -> bool:
        with self._thread_lock:
            self._unmeasured += num_bytes
            if self._unmeasured < max_bytes // SCAN_SHARE:
                return False
            # Set before the folder is measured: threads that write meanwhile do not measure it, too.
            self._unmeasured = 0
            return True

    def _make_room(self, num_bytes: int, error: OSError) -> None:
        """Make room on a full disk as if what the folder holds now were its limit.

        Raises ``error`` if the disk is not full, or the whole folder is smaller than ``num_bytes``.
        """
        size = sum(item.size for item in self.list())
        if error.errno not in _FULL or size < num_bytes:
            raise error
        self._trim(size - num_bytes)

    def _trim(self, max_bytes: int) -> None:
        """Remove the least recently used items of a folder above its limit, and unfinished files of dead writers."""
        items = sorted(self.list(), key=lambda item: item.used)
        size = sum(item.size for item in items)
        if size > max_bytes:
            for item in items:
                if size <= max_bytes * TRIM_TO:
                    break
                self.delete(item.name)
                size -= item.size
        # Younger ones may be a write of another process that is under way.
        oldest = time.time() - SCRATCH_S
        for path in (self._folder / SCRATCH).iterdir():
            with suppress(FileNotFoundError):
                if path.stat().st_mtime < oldest:
                    path.unlink()
