"""A folder as a store: atomic by rename, safe for many writers, limited in size."""

from __future__ import annotations

import fcntl
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sgl_kvevict.errors import StoreError
from sgl_kvevict.store.backend import Item, check_name, is_name

SCRATCH = ".scratch"
LOCK = ".lock"
SCRATCH_S = 3600.0
"""Files that nobody finished within this time are removed."""
SCAN_SHARE = 16
"""The folder is measured again when this process has written a 16th of the limit: others write too."""
TRIM_TO = 0.9
"""Share of the limit that is left when something has to go, so that not every write has to look."""


class DirectoryBackend:
    """Files below a folder, on a local or a shared file system.

    What is written appears under its name in one rename. Reading notes the time, so that what was used longest ago goes
    first when the folder is larger than it may be. Read, change and write of a manifest is one step for all processes
    (an advisory lock on one file).

    Args:
        folder: made if it is not there.
        max_bytes: size limit of all files together; None: no limit.

    Raises:
        StoreError: the folder cannot be made.
    """

    def __init__(self, folder: Path, max_bytes: int | None = None) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._size: int | None = None
        self._since_scan = 0
        with self._errors("made"):
            (folder / SCRATCH).mkdir(parents=True, exist_ok=True)

    @property
    def url(self) -> str:
        """The folder."""
        return str(self._folder)

    def put(self, name: str, data: bytes) -> None:
        """See :meth:`Backend.put`; what was used longest ago makes room."""
        if self._max_bytes is not None and len(data) > self._max_bytes:
            raise StoreError(f"store {self.url!r}: an item of {len(data)} bytes; its limit is {self._max_bytes}")
        self._write(name, data)
        self._make_room(len(data))

    def get(self, name: str) -> bytes | None:
        """See :meth:`Backend.get`."""
        path = self._path(name)
        with self._errors("read"):
            try:
                data = path.read_bytes()
            except (FileNotFoundError, NotADirectoryError):
                self._require_folder()
                return None
        with suppress(OSError):  # read-only for us, or just removed: then its age is not ours to note
            os.utime(path)
        return data

    def exists(self, name: str) -> bool:
        """See :meth:`Backend.exists`."""
        with self._errors("read"):
            return self._path(name).is_file()

    def delete(self, name: str) -> bool:
        """See :meth:`Backend.delete`."""
        with self._errors("changed"):
            try:
                self._path(name).unlink()
            except (FileNotFoundError, NotADirectoryError):
                return False
        return True

    def list(self, prefix: str = "") -> Iterator[Item]:
        """See :meth:`Backend.list`."""
        folder = self._path(prefix) if prefix else self._folder
        with self._errors("read"):
            self._require_folder()
            for path in folder.rglob("*"):
                name = path.relative_to(self._folder).as_posix()
                if not is_name(name):  # scratch, the lock, or not ours
                    continue
                with suppress(FileNotFoundError):  # removed by somebody since
                    if path.is_file():
                        status = path.stat()
                        yield Item(name, status.st_size, status.st_mtime)

    def update(self, name: str, change: Callable[[bytes | None], bytes]) -> None:
        """See :meth:`Backend.update`; one process at a time."""
        with self._exclusive():
            self._write(name, change(self.get(name)))

    # ---- inside -----------------------------------------------------------------------------------------------

    def _path(self, name: str) -> Path:
        return self._folder / check_name(name)

    def _require_folder(self) -> None:
        if not self._folder.is_dir():
            raise StoreError(f"store {self.url!r}: the folder is not there")

    def _write(self, name: str, data: bytes) -> None:
        path = self._path(name)
        scratch = self._folder / SCRATCH / uuid.uuid4().hex
        with self._errors("written"):
            try:
                scratch.parent.mkdir(parents=True, exist_ok=True)
                scratch.write_bytes(data)
                path.parent.mkdir(parents=True, exist_ok=True)
                scratch.rename(path)
            finally:
                scratch.unlink(missing_ok=True)

    def _make_room(self, num_bytes: int) -> None:
        """Remove what was used longest ago, if the folder has become too large."""
        if self._max_bytes is None:
            return
        with self._lock:
            self._since_scan += num_bytes
            if self._size is not None and self._since_scan < self._max_bytes // SCAN_SHARE:
                return
        with self._exclusive():
            items = sorted(self.list(), key=lambda item: item.used)
            size = sum(item.size for item in items)
            if size > self._max_bytes:
                for item in items:
                    if size <= self._max_bytes * TRIM_TO:
                        break
                    self.delete(item.name)
                    size -= item.size
            self._remove_scratch()
        with self._lock:
            self._size, self._since_scan = size, 0

    def _remove_scratch(self) -> None:
        """Remove what writers left behind that died."""
        oldest = time.time() - SCRATCH_S
        with self._errors("changed"):
            for path in (self._folder / SCRATCH).iterdir():
                with suppress(FileNotFoundError):
                    if path.stat().st_mtime < oldest:
                        path.unlink()

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """One process, and one thread of it, at a time."""
        with self._errors("locked"):
            file = os.open(self._folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            with self._errors("locked"):
                fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            os.close(file)

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreError(f"store {self.url!r} cannot be {what}: {error}") from error
