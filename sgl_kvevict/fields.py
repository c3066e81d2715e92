"""Describes in words what a field of a pydantic model accepts, for error messages and the tables of the docs."""

from __future__ import annotations

from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import ByteSize
from pydantic.fields import FieldInfo


def extra_of(field: FieldInfo) -> dict[str, Any]:
    """``json_schema_extra`` of a field."""
    return field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}


def allowed(field: FieldInfo) -> str:
    """Return the extra "allowed" of a field, else its type and limits, such as "an integer >= 1"."""
    extra = extra_of(field)
    if "allowed" in extra:
        return str(extra["allowed"])
    is_union = get_origin(field.annotation) in (Union, UnionType)
    kinds = get_args(field.annotation) if is_union else (field.annotation,)
    limits = {
        name: getattr(one, name) for one in field.metadata for name in ("gt", "ge", "lt", "le") if hasattr(one, name)
    }
    integer = "an odd integer" if extra.get("odd") else "an integer"
    words = [_in_words(kind, limits, integer) for kind in kinds if kind is not NoneType]
    return " or ".join(words) + (", or null" if NoneType in kinds else "")


def _in_words(kind: Any, limits: dict[str, Any], integer: str) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(repr(choice) for choice in get_args(kind))
    if kind is bool:
        return "true or false"
    if kind is ByteSize:
        return f"an amount like 64MiB, 40GB or a number of bytes, >= {limits['ge']}"
    if kind is float and "gt" in limits:
        return f"a float in ({limits['gt']}, " + (f"{limits['le']}]" if "le" in limits else f"{limits['lt']})")
    if kind in (int, float):
        name = integer if kind is int else "a number"
        return f"{name} from {limits['ge']} to {limits['le']}" if "le" in limits else f"{name} >= {limits['ge']}"
    return "a string"
