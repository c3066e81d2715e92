"""Operations on a whole store, for operators: check, copy, find segments by the first digits of their names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from sgl_kvevict.errors import ConfigError, CorruptSegmentError, cut
from sgl_kvevict.store.backend import Backend
from sgl_kvevict.store.manifest import decode_manifest, merge_manifest
from sgl_kvevict.store.segment_file import decode_segment
from sgl_kvevict.store.segments import StoredSegment, list_segments

SHOWN_DIGITS = 16
MIN_DIGITS = 4


def find_segments(backend: Backend, keys: Sequence[str]) -> list[StoredSegment]:
    """Return one segment per key; ``keys`` are beginnings of names, at least 4 digits each.

    Raises:
        ConfigError: a key matches no segment, or several.
    """
    segments, named = list(list_segments(backend)), []
    for key in keys:
        found = [each for each in segments if len(key) >= MIN_DIGITS and each.key.startswith(key)]
        if len(found) != 1:
            raise ConfigError(f"key: got {key!r}, which names {len(found)} segments; allowed: the beginning of one")
        named += found
    return named


def tokens_of_segments(backend: Backend) -> dict[str, int]:
    """Length of each segment (tokens), by key; segments listed only in corrupt manifests are missing."""
    tokens: dict[str, int] = {}
    for item in list(backend.list()):
        data = backend.get(item.name) if _kind(item.name) == "manifests" else None
        if data is not None:
            with suppress(CorruptSegmentError):
                tokens |= {entry.key: entry.end - entry.start for entry in decode_manifest(data)}
    return tokens


def verify_store(backend: Backend, say: Callable[[str], None], *, delete: bool = False) -> Counter[str]:
    """Check all segments and manifests; count sound ``segments`` and ``manifests``, and ``corrupt`` files.

    ``say`` gets a line for each corrupt file; with ``delete`` it is removed.
    """
    found: Counter[str] = Counter()
    for item in list(backend.list()):
        data = None if _kind(item.name) == "other" else backend.get(item.name)
        if data is None:
            continue
        try:
            found[_check(item.name, data)] += 1
        except CorruptSegmentError as error:
            found["corrupt"] += 1
            say(f"{item.name}: {cut(str(error))}{' (removed)' if delete else ''}")
            if delete:
                backend.delete(item.name)
    return found


def copy_store(source: Backend, target: Backend, say: Callable[[str], None]) -> Counter[str]:
    """Copy files that the target lacks; count ``segments``, ``manifests``, ``other``, and ``corrupt`` ones.

    Segments come before the manifests that list them. The source is listed before anything is written. ``say`` gets a
    line for each corrupt file, which is not copied.
    """
    counts: Counter[str] = Counter()
    for item in sorted(source.list(), key=lambda item: _kind(item.name) != "segments"):
        is_there = _kind(item.name) != "manifests" and target.exists(item.name)
        data = None if is_there else source.get(item.name)
        if data is None:
            continue
        try:
            kind = _check(item.name, data)
        except CorruptSegmentError as error:
            counts["corrupt"] += 1
            say(f"{item.name}: {cut(str(error))} (not copied)")
            continue
        if kind == "manifests":
            target.update(item.name, partial(merge_manifest, entries=decode_manifest(data)))
        else:
            target.put(item.name, data)
        counts[kind] += 1
    return counts


def _kind(name: str) -> str:
    """``segments`` or ``manifests``; ``other`` for descriptions of identities."""
    parts = name.split("/")
    return parts[2] if len(parts) == 5 and parts[2] in ("segments", "manifests") else "other"


def _check(name: str, data: bytes) -> str:
    """Kind of a file; ``CorruptSegmentError`` unless it decodes, a segment with its own name and identity."""
    kind, parts = _kind(name), name.split("/")
    if kind == "manifests":
        decode_manifest(data)
    elif kind == "segments":
        identity = decode_segment(data, parts[4]).identity
        if identity != parts[1]:
            raise CorruptSegmentError(
                f"identity: got {identity[:SHOWN_DIGITS]!r}; expected {parts[1][:SHOWN_DIGITS]!r}"
            )
    return kind
