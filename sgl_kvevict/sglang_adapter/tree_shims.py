"""What differs between the supported versions of SGLang in the components of its tree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T", bound=type)


def newest_names(component: T) -> T:
    """Class decorator for a component of ours: SGLang 0.5.22 calls ``reclaimable_value_len`` ``reclaimable_tokens``."""
    if not hasattr(component.__bases__[0], "reclaimable_value_len"):
        named = "reclaimable_value_len", "reclaimable_tokens"
        ours, theirs = named if named[0] in vars(component) else reversed(named)
        # SGLang's own methods call theirs, and our code calls ours: both names have to lead to the override.
        setattr(component, theirs, getattr(component, ours))
    return component


def actions_of(result: Any) -> list[Any]:
    """What SGLang wants applied after the eviction of a leaf; 0.5.22 has applied it."""
    actions: list[Any] = getattr(result, "cache_actions", [])
    return actions


def apply_later(component: Any, action: Any, eviction: Mapping[str, Any]) -> None:
    """Have SGLang apply an action after a call of ``evict_component``; 0.5.22 has no list for it, so it comes now."""
    actions: list[Any] | None = eviction.get("cache_actions")
    if actions is None:
        component.apply_component_action(action)
    else:
        actions.append(action)
