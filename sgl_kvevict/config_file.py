"""Files that hold a configuration: JSON or YAML, read as plain values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from sgl_kvevict.errors import ConfigError, shown

CONFIG_SUFFIXES = (".json", ".yaml", ".yml")


def read_config_file(path: Path) -> dict[str, Any]:
    """Read the values of a JSON or YAML file, unchecked.

    Raises:
        ConfigError: wrong file type, unreadable file, or not one object.
    """
    if path.suffix not in CONFIG_SUFFIXES:
        raise ConfigError(f"configuration file: got {str(path)!r}; allowed: a {shown_suffixes()} file")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration file {str(path)!r} cannot be read: {error}") from error
    return decode_config(text, path.suffix, str(path))


def shown_suffixes() -> str:
    """The kinds of files that may hold a configuration, for messages."""
    return f"{', '.join(CONFIG_SUFFIXES[:-1])} or {CONFIG_SUFFIXES[-1]}"


def decode_config(text: str, suffix: str, source: str) -> dict[str, Any]:
    """Decode the values of a configuration, unchecked.

    Args:
        text: JSON, or YAML.
        suffix: which; one of ``CONFIG_SUFFIXES``.
        source: where the text comes from, named in the error.

    Raises:
        ConfigError: not such a text, or not one object.
    """
    try:
        values = json.loads(text) if suffix == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:  # ValueError: not JSON, or an integer with thousands of digits
        raise ConfigError(f"{source} is not valid {suffix[1:].upper()}: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{source} is nested too deeply") from error
    if values is None and suffix != ".json":
        return {}  # an empty YAML file, or one with comments only
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise ConfigError(f"{source}: got {shown(values)}; allowed: an object of configuration fields")
    return values
