"""Describes in words what a field of a pydantic model accepts, for error messages and the tables of the docs."""

from __future__ import annotations

from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo


def allowed(field: FieldInfo) -> str:
    """Return ``json_schema_extra["allowed"]`` of a field, else its type and limits, such as "an integer >= 1"."""
    if isinstance(field.json_schema_extra, dict):
        return str(field.json_schema_extra["allowed"])
    is_union = get_origin(field.annotation) in (Union, UnionType)
    kinds = get_args(field.annotation) if is_union else (field.annotation,)
    limits = {
        name: getattr(one, name) for one in field.metadata for name in ("gt", "ge", "lt", "le") if hasattr(one, name)
    }
    words = [_in_words(kind, limits) for kind in kinds if kind is not NoneType]
    return " or ".join(words) + (", or null" if NoneType in kinds else "")


def _in_words(kind: Any, limits: dict[str, Any]) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(repr(choice) for choice in get_args(kind))
    if kind is bool:
        return "true or false"
    if kind is int:
        return (
            f"an integer from {limits['ge']} to {limits['le']}" if "le" in limits else f"an integer >= {limits['ge']}"
        )
    if kind is float:
        lower = f"[{limits['ge']}" if "ge" in limits else f"({limits['gt']}"
        upper = f"{limits['le']}]" if "le" in limits else f"{limits['lt']})"
        return f"a float in {lower}, {upper}"
    return "a string"
