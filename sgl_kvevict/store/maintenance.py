"""Operations on a whole store, for operators: check, copy, find segments by the first digits of their names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from sgl_kvevict.errors import ConfigError, CorruptSegmentError, cut
from sgl_kvevict.store.backend import Backend
from sgl_kvevict.store.segment_file import read_header
from sgl_kvevict.store.segments import ROOT, StoredSegment, decode_entry, list_segments

SHOWN_DIGITS = 16
MIN_DIGITS = 4
CORRUPT = "corrupt"


def find_segments(backend: Backend, keys: Sequence[str]) -> list[StoredSegment]:
    """Return one segment per key; ``keys`` are beginnings of names, at least 4 digits each.

    ConfigError: a key matches no segment, or several.
    """
    segments, named = list(list_segments(backend)), []
    for key in keys:
        found = [each for each in segments if len(key) >= MIN_DIGITS and each.key.startswith(key)]
        if len(found) != 1:
            raise ConfigError(f"key: got {key!r}, which names {len(found)} segments; allowed: the beginning of one")
        named += found
    return named


def verify_store(backend: Backend, report: Callable[[str], None], *, delete: bool = False) -> Counter[str]:
    """Check all segments and files of the index; count sound ``segments`` and ``prefixes``, and ``corrupt`` files.

    ``report`` gets a line for each corrupt file; with ``delete`` it is removed.
    """
    found: Counter[str] = Counter()
    # A list, because files are removed below.
    for item in list(backend.list(ROOT)):
        data = None if _kind(item.name) == "other" else backend.get(item.name)
        if data is not None:
            kind = _check(item.name, data, report, " (removed)" if delete else "")
            found[kind] += 1
            if kind == CORRUPT and delete:
                backend.delete(item.name)
    return found


def copy_store(source: Backend, target: Backend, report: Callable[[str], None]) -> Counter[str]:
    """Copy files that the target lacks; count ``segments``, ``prefixes`` (of the index), ``other``, ``corrupt`` ones.

    ``report`` gets a line for each corrupt file, which is not copied.
    """
    counts: Counter[str] = Counter()
    # Segments before the files that list them: a server that uses the target meanwhile never finds an entry without its
    # file. ``sorted`` also ends the listing before the first write, should both be one place.
    for item in sorted(source.list(ROOT), key=lambda item: _kind(item.name) != "segments"):
        data = None if target.exists(item.name) else source.get(item.name)
        if data is not None:
            kind = _check(item.name, data, report, " (not copied)")
            if kind != CORRUPT:
                target.put(item.name, data)
            counts[kind] += 1
    return counts


def _kind(name: str) -> str:
    """``segments``, or ``prefixes`` (files of the index); ``other`` for descriptions of identities."""
    parts = name.split("/")
    return parts[2] if len(parts) == 5 and parts[2] in ("segments", "prefixes") else "other"


def _check(name: str, data: bytes, report: Callable[[str], None], then: str) -> str:
    """Kind of a file that is whole, a segment under its own name and identity; else ``corrupt``, which is reported."""
    kind, parts = _kind(name), name.split("/")
    try:
        if kind == "prefixes":
            decode_entry(data)
        elif kind == "segments":
            header = read_header(data)
            # A whole file in the wrong place passes its checksum, and would be refused at each load.
            if (header["identity"], header["key"]) != (parts[1], parts[4]):
                raise CorruptSegmentError(f"a segment of another name: {header['key'][:SHOWN_DIGITS]!r}")
    except CorruptSegmentError as error:
        report(f"{name}: {cut(str(error))}{then}")
        return CORRUPT
    return kind
