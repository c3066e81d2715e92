"""The errors users can catch; everything raised on purpose derives from :class:`KVEvictError`."""

from __future__ import annotations

from collections.abc import Sequence


class KVEvictError(Exception):
    """Root of all errors raised by this package."""


class ConfigError(KVEvictError, ValueError):
    """A configuration value is unknown or out of range; names field, value and what is allowed."""


class UnsupportedSetupError(KVEvictError):
    """The server's settings do not work with compressed prefixes; lists every reason at once.

    Args:
        reasons: one sentence per setting that must change.
    """

    def __init__(self, reasons: Sequence[str]) -> None:
        self.reasons = tuple(reasons)
        lines = "\n".join(f"  - {reason}" for reason in self.reasons)
        super().__init__(f"sgl-kvevict cannot serve this setup:\n{lines}")


class InvariantError(KVEvictError):
    """An internal invariant is broken (for example: slots do not add up); a bug, never the user's fault."""
