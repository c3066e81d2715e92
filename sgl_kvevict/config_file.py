"""Configurations as JSON, read as plain values."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from sgl_kvevict.errors import ConfigError, shown


def read_config_file(path: Path) -> dict[str, Any]:
    """Read the values of a JSON file, unchecked.

    Raises:
        ConfigError: not a ``.json`` file, unreadable, or not one object.
    """
    if path.suffix != ".json":
        raise ConfigError(f"configuration file: got {str(path)!r}; allowed: a .json file")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration file {str(path)!r} cannot be read: {error}") from error
    return decode_config(text, str(path))


def decode_config(text: str, source: str) -> dict[str, Any]:
    """Decode the values of a configuration, unchecked; ``source`` is for error messages.

    Raises:
        ConfigError: the text is not JSON, names a field twice, or is not one object.
    """
    try:
        values = json.loads(text, object_pairs_hook=_object)
    except RecursionError as error:
        raise ConfigError(f"{source} is nested too deeply") from error
    except ValueError as error:  # also an integer with thousands of digits
        raise ConfigError(f"{source} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{source}: got {shown(values)}; allowed: an object of configuration fields")
    return values


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    if twice:
        raise ValueError(f"{', '.join(map(shown, twice))} is there twice; allowed: once")
    return dict(pairs)
