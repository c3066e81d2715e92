"""What operators do with a whole store: check it, copy it, find segments by the beginning of their names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from sgl_kvevict.errors import ConfigError, CorruptSegmentError, cut
from sgl_kvevict.store.backend import Backend
from sgl_kvevict.store.manifest import decode_manifest, merge_manifest
from sgl_kvevict.store.segment_file import decode_segment
from sgl_kvevict.store.segments import StoredSegment, list_segments, segment_name

SHOWN_DIGITS = 16
MIN_DIGITS = 4


def find_segments(backend: Backend, keys: Sequence[str]) -> list[StoredSegment]:
    """One segment per key.

    Args:
        backend: the store.
        keys: first digits of segments' names, at least 4 each.

    Raises:
        ConfigError: a key names no segment, or several.
    """
    segments = list(list_segments(backend))
    named = []
    for key in keys:
        found = [each for each in segments if len(key) >= MIN_DIGITS and each.key.startswith(key)]
        if len(found) != 1:
            raise ConfigError(
                f"key: got {key!r}, which names {len(found)} segments; allowed: the beginning of one name"
            )
        named += found
    return named


def tokens_of_segments(backend: Backend) -> dict[str, int]:
    """Tokens that each segment stands for, by key, as manifests say; those that no sound one lists are not in it."""
    tokens: dict[str, int] = {}
    for item in list(backend.list()):
        data = backend.get(item.name) if _kind(item.name) == "manifests" else None
        if data is not None:
            with suppress(CorruptSegmentError):  # `verify` tells of it
                tokens |= {entry.key: entry.end - entry.start for entry in decode_manifest(data)}
    return tokens


def verify_store(backend: Backend, say: Callable[[str], None], *, delete: bool = False) -> Counter[str]:
    """Read everything and check every checksum.

    Args:
        backend: the store.
        say: called with a line for each file that is corrupt.
        delete: remove what is corrupt.

    Returns:
        Number of files that are sound, under ``segments`` and ``manifests``, and under ``corrupt``.
    """
    found: Counter[str] = Counter()
    for item in list(backend.list()):
        kind, data = _kind(item.name), backend.get(item.name)
        if data is None or kind == "other":
            continue
        try:
            if kind == "segments":
                _check_segment(item.name, data)
            else:
                decode_manifest(data)
            found[kind] += 1
        except CorruptSegmentError as error:
            found["corrupt"] += 1
            say(f"{item.name}: {cut(str(error))}{' (removed)' if delete else ''}")
            if delete:
                backend.delete(item.name)
    return found


def copy_store(source: Backend, target: Backend, say: Callable[[str], None]) -> Counter[str]:
    """Copy what the target lacks, checked on the way.

    Segments go first, then what lists them: nobody finds what is not there yet.

    Args:
        source: where from.
        target: where to.
        say: called with a line for each file that is corrupt, which is not copied.

    Returns:
        Number of files copied, under ``segments``, ``manifests`` and ``other``, and under ``corrupt``.
    """
    counts: Counter[str] = Counter()
    items = sorted(source.list(), key=lambda item: _kind(item.name) != "segments")
    for item in items:
        kind, parts = _kind(item.name), item.name.split("/")
        if kind == "segments" and target.exists(segment_name(parts[1], parts[4])):
            continue
        data = source.get(item.name)
        if data is None:
            continue
        try:
            if kind == "segments":
                _check_segment(item.name, data)
                target.put(item.name, data)
            elif kind == "manifests":
                target.update(item.name, partial(merge_manifest, entries=decode_manifest(data)))
            elif target.exists(item.name):
                continue
            else:
                target.put(item.name, data)
            counts[kind] += 1
        except CorruptSegmentError as error:
            counts["corrupt"] += 1
            say(f"{item.name}: {cut(str(error))} (not copied)")
    return counts


def _kind(name: str) -> str:
    """``segments`` or ``manifests``, or ``other`` for what describes identities."""
    parts = name.split("/")
    return parts[2] if len(parts) == 5 and parts[2] in ("segments", "manifests") else "other"


def _check_segment(name: str, data: bytes) -> None:
    """A segment decodes, under its own name, in its own identity's folder."""
    parts = name.split("/")
    identity, folder = decode_segment(data, parts[4]).identity, parts[1]
    if identity != folder:
        raise CorruptSegmentError(f"identity: got {identity[:SHOWN_DIGITS]!r}; expected {folder[:SHOWN_DIGITS]!r}")
