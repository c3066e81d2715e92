"""Files that hold a configuration: JSON or YAML, read as plain values."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Any

import yaml

from sgl_kvevict.errors import ConfigError, shown

CONFIG_SUFFIXES = (".json", ".yaml", ".yml")
SUFFIXES_IN_WORDS = ".json, .yaml or .yml"


def read_config_file(path: Path) -> dict[str, Any]:
    """Read the values of a JSON or YAML file, unchecked.

    Raises:
        ConfigError: wrong file type, unreadable file, or not one object.
    """
    if path.suffix not in CONFIG_SUFFIXES:
        raise ConfigError(f"configuration file: got {str(path)!r}; allowed: a {SUFFIXES_IN_WORDS} file")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration file {str(path)!r} cannot be read: {error}") from error
    return decode_config(text, path.suffix, str(path))


def decode_config(text: str, suffix: str, source: str) -> dict[str, Any]:
    """Decode the values of a configuration, unchecked; ``suffix`` tells the format, ``source`` is for error messages.

    Raises:
        ConfigError: the text cannot be decoded, names a field twice, or is not one object.
    """
    try:
        values = json.loads(text, object_pairs_hook=_object) if suffix == ".json" else yaml.load(text, _Loader)
    except RecursionError as error:
        raise ConfigError(f"{source} is nested too deeply") from error
    except (ValueError, yaml.YAMLError) as error:  # ValueError: not JSON, or an integer with thousands of digits
        reason = " ".join(str(error).split())
        raise ConfigError(f"{source} is not valid {suffix[1:].upper()}: {reason}") from error
    if values is None and suffix != ".json":
        return {}  # an empty YAML file, or one with comments only
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise ConfigError(f"{source}: got {shown(values)}; allowed: an object of configuration fields")
    return values


class _Loader(yaml.SafeLoader):
    """YAML with 1.2's floats (``2e-1`` is a string in YAML 1.1); refuses duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        _check_unique(key.value for key, _ in node.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"), list("-+.0123456789")
)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _check_unique(name for name, _ in pairs)
    return dict(pairs)


def _check_unique(keys: Iterable[Any]) -> None:
    twice = [str(key) for key, count in Counter(map(str, keys)).items() if count > 1]
    if twice:
        raise ValueError(f"{', '.join(map(shown, twice))} is there twice; allowed: once")
