"""Paths that users name, and the place of our cache: ``~`` is replaced, or the error says why it cannot be."""

from __future__ import annotations

import os
import secrets
import tempfile
from pathlib import Path

from sgl_kvevict.errors import ConfigError, shown


def expanded(path: str, name: str) -> Path:
    """Replace ``~`` and ``~USER`` at a path's beginning; ConfigError, which says ``name``, without such a folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        user = path.partition("/")[0].removeprefix("~")
        whose = f"user {user!r}" if user else f"this user (uid {os.getuid()})"
        allowed = "a path without ~" if user else "a path without ~, or set HOME to a folder"
        raise ConfigError(f"{name}: got {shown(path)}, but {whose} has no home folder; allowed: {allowed}") from error


def cache_folder(part: str) -> Path:
    """Folder ``sgl-kvevict/PART`` in ``$XDG_CACHE_HOME`` or ``~/.cache``; ConfigError without either."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return expanded(home, "XDG_CACHE_HOME, the user's cache") / "sgl-kvevict" / part


def replace_file(path: Path, content: bytes) -> None:
    """Write a file and rename it into place, so that a reader finds all of it or none; OSError if that fails."""
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(8)}")  # hosts may share the folder
    try:
        scratch.write_bytes(content)
        scratch.rename(path)
    finally:
        scratch.unlink(missing_ok=True)


def write_error(folder: Path) -> str | None:
    """Return why a folder, which may not exist yet, is not writable; None if it is."""
    try:
        # The folder is made at the start; its nearest parent says whether it can be.
        while not folder.exists():
            folder = folder.parent
        if not folder.is_dir():
            return f"{folder} is not a folder"
        # Tried, because permission bits say nothing of read-only file systems, quotas, or root.
        with tempfile.TemporaryDirectory(dir=folder):
            return None
    except (OSError, ValueError) as error:  # ValueError: a NUL
        return str(getattr(error, "strerror", None) or error)
