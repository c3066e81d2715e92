"""The package's errors: every error raised on purpose derives from :class:`KVEvictError`."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Sequence
from itertools import islice

MAX_SHOWN_CHARS = 200
"""Characters of a value in an error message."""


class KVEvictError(Exception):
    """Root of all errors raised by this package."""


class ConfigError(KVEvictError, ValueError):
    """A configuration value is unknown or out of range; names field, value and what is allowed."""


class UnsupportedSetupError(KVEvictError):
    """The server's settings do not work with compressed prefixes; lists one sentence per setting that must change."""

    def __init__(self, reasons: Sequence[str]) -> None:
        self.reasons = tuple(reasons)
        lines = "\n".join(f"  - {reason}" for reason in self.reasons)
        super().__init__(f"sgl-kvevict cannot serve this setup:\n{lines}")


class StoreError(KVEvictError):
    """A store cannot be reached, read or written; its prefixes are computed instead."""


class CorruptSegmentError(StoreError):
    """A stored segment is damaged or has another format; it is not used."""


class UnreadableItemError(StoreError):
    """One item of a store that answers cannot be read; it is not tried again for a while."""


class InvariantError(KVEvictError):
    """An internal invariant is broken (for example: slots do not add up): a bug of ours."""


def shown(value: object) -> str:
    """Return a value as JSON, at most ``MAX_SHOWN_CHARS`` long and on one line; no more of a huge value is visited.

    Characters that are not printable are escaped, and what JSON does not have is shown as Python does.
    """
    return cut(_escaped(_ShortJson().repr(value)))


def cut(text: str) -> str:
    """Return at most ``MAX_SHOWN_CHARS`` of a text, as :func:`printable`: messages quote clients and files."""
    # Cut before it is escaped: a client may send megabytes.
    short = printable(text[: MAX_SHOWN_CHARS + 1])
    return short if len(short) <= MAX_SHOWN_CHARS else f"{short[: MAX_SHOWN_CHARS - 3]}..."


def printable(text: str) -> str:
    """A text of others on one line and without control characters, which a terminal would obey."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def _escaped(text: str) -> str:
    """Escape characters that are not printable, as JSON does: also those that it need not escape."""
    escaped = (f"\\u{ord(char):04x}" if ord(char) < 0x10000 else json.dumps(char)[1:-1] for char in text)
    return "".join(char if char.isprintable() else other for char, other in zip(text, escaped, strict=True))


class _ShortJson(reprlib.Repr):
    """Methods are named after the types that they show."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 4
        self.maxstring = self.maxother = self.maxlong = MAX_SHOWN_CHARS

    def repr_float(self, x: float | bool | None, level: int) -> str:
        """A number, NaN or Infinity; also True, False and None."""
        return json.dumps(x)

    repr_bool = repr_NoneType = repr_float

    def repr_str(self, x: str, level: int) -> str:
        """A text, in quotes also if it is cut."""
        text = _escaped(json.dumps(x[: self.maxstring], ensure_ascii=False))
        whole = len(x) <= self.maxstring and len(text) <= self.maxstring
        return text if whole else f'{text[: self.maxstring - 4]}..."'

    def repr_dict(self, x: dict[object, object], level: int) -> str:
        """An object; a few fields are taken before they are sorted."""
        return super().repr_dict(dict(islice(x.items(), self.maxdict + 1)), level)

    def repr_tuple(self, x: tuple[object, ...], level: int) -> str:
        """A list, as JSON has no tuples."""
        return super().repr_list(list(x), level)

    def repr_int(self, x: int, level: int) -> str:
        """Integers; of those that are too long for decimal digits, which Python refuses to print, the length."""
        return super().repr_int(x, level) if x.bit_length() < 10_000 else f"an integer of {x.bit_length()} bits"
