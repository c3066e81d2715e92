"""One row of the registry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sgl_kvevict.policies.policy import Policy


@dataclass(frozen=True)
class PolicyEntry:
    """A named method.

    Attributes:
        name: as users select it.
        summary: the idea in one line.
        options_type: dataclass of :func:`option` fields.
        build: makes the policy from checked options.
    """

    name: str
    summary: str
    options_type: type[Any]
    build: Callable[[Any], Policy]
