"""The identity of a model: a hash of every byte of its weights, computed once for files that do not change."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

from sgl_kvevict.errors import ConfigError
from sgl_kvevict.paths import cache_folder, replace_file

logger = logging.getLogger(__name__)

BLOCK_BYTES = 1 << 22
MAX_THREADS = 8
"""Hashing lets other threads run; a disk has no more to give to more of them."""
_HEADER_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 1 << 28
_DIGEST = re.compile(r"[0-9a-f]{64}")

State = tuple[int, ...]


def fingerprint_of(folder: Path) -> str | None:
    """SHA-256 over names, types, shapes and bytes of all tensors of a model folder.

    Independent of the split into files; different if one number of one tensor is. The hashes of a file's tensors are
    kept in the user's cache, for as long as its size, times and inode stay. None if there are no safetensors files, or
    one cannot be read.
    """
    found: list[tuple[str, str]] = []
    try:
        for path in sorted(folder.glob("*.safetensors")):
            # Resolved: the same file is often reached by links of a hub's cache, and is hashed once.
            found += _digests(path.resolve(), _state(path.stat())).items()
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not found:
        return None
    digest = hashlib.sha256()
    # Sorted over all files, so that how a model is split into files does not matter.
    for name, content in sorted(found):
        digest.update(f"{name}\0{content}".encode())
    return digest.hexdigest()


def _state(status: os.stat_result) -> State:
    """Changes whenever a file does: the time of change of the inode cannot be set by programs that copy files."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


@lru_cache(maxsize=256)
def _digests(path: Path, state: State) -> dict[str, str]:
    """A hash of each tensor of a file, from the cache if the file is as it was."""
    with path.open("rb") as file, _cache_entry(path) as entry:
        header, begin = _header(file)
        if (kept := None if entry is None else _kept(entry, state, header.keys())) is not None:
            return kept
        started = time.monotonic()
        with ThreadPoolExecutor(min(MAX_THREADS, len(os.sched_getaffinity(0)))) as pool:
            hashes = [pool.submit(_hash, file.fileno(), begin, described) for described in header.values()]
            digests = dict(zip(header, (each.result() for each in hashes), strict=True))
        logger.info("kvevict: read %s to identify the model: %.1f s", path, time.monotonic() - started)
        if entry is not None and _state(os.fstat(file.fileno())) == state:  # else it was written meanwhile
            with suppress(OSError):  # read-only: computed again by the next process
                replace_file(entry, json.dumps({"state": state, "digests": digests}).encode())
        return digests


@contextmanager
def _cache_entry(path: Path) -> Iterator[Path | None]:
    """Where the hashes of a file are kept; one process at a time computes them. None: this user has no cache."""
    try:
        entry = cache_folder("fingerprints") / f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:32]}.json"
    except ConfigError:
        yield None
        return
    with ExitStack() as open_files:
        with suppress(OSError):  # read-only, or a file system without locks
            entry.parent.mkdir(parents=True, exist_ok=True)
            lock = open_files.enter_context(entry.with_suffix(".lock").open("ab"))
            fcntl.flock(lock, fcntl.LOCK_EX)  # the ranks of a server start at once
        yield entry


def _kept(entry: Path, state: State, names: Any) -> dict[str, str] | None:
    """The hashes in the cache; None if they are not there, are those of another state, or are not hashes."""
    try:
        content = json.loads(entry.read_bytes())
        digests: dict[str, str] = content["digests"]
        is_sound = digests.keys() == names and all(map(_DIGEST.fullmatch, digests.values()))
        return digests if is_sound and tuple(content["state"]) == state else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _header(file: BinaryIO) -> tuple[dict[str, Any], int]:
    """What a safetensors file says of each tensor, and where their bytes begin."""
    length = int.from_bytes(file.read(_HEADER_LENGTH_BYTES), "little")
    if length > _MAX_HEADER_BYTES:
        raise ValueError(f"a header of {length} bytes")
    header = json.loads(file.read(length))
    if not isinstance(header, dict):
        raise ValueError(f"a header that is a {type(header).__name__}")
    header.pop("__metadata__", None)
    return header, _HEADER_LENGTH_BYTES + length


def _hash(file: int, offset: int, tensor: dict[str, Any]) -> str:
    """SHA-256 of a tensor's type, shape and bytes; ``offset``: where the bytes of all tensors begin."""
    begin, end = (offset + place for place in tensor["data_offsets"])
    digest = hashlib.sha256(f"{tensor['dtype']} {tensor['shape']}\0".encode())
    while begin < end:
        # pread, because threads share the file and each has a place of its own.
        block = os.pread(file, min(BLOCK_BYTES, end - begin), begin)
        if not block:
            raise ValueError("the file ends within a tensor")
        digest.update(block)
        begin += len(block)
    return digest.hexdigest()
