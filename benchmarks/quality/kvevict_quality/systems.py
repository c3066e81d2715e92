"""Systems under test, as the command line names them, and the servers for them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sgl_kvevict.launcher import STRICT_CHECK_ENV, System, kvevict_system, stock_system

FULL = "full"
KNOWN_QUESTIONS = "known-questions"
"""The policy ``questions``, given the very questions that will be asked: not to be had where a prefix is shared, but
what a budget could hold."""
POOL_SLOTS = 24_000


@dataclass(frozen=True)
class Setup:
    """One server to start: the full cache of stock SGLang, or a policy with a budget.

    Attributes:
        policy: a policy's name, ``FULL`` or ``KNOWN_QUESTIONS``.
        budget: share of the entries; 1.0 for ``FULL``.
        options: of the policy.
    """

    policy: str
    budget: float
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def engine(self) -> str:
        """Who serves it."""
        return "stock" if self.policy == FULL else "kvevict"

    @property
    def options_text(self) -> str:
        """Options as they stand in a row."""
        return " ".join(f"{name}={value}" for name, value in sorted(self.options.items()))

    @property
    def name(self) -> str:
        """For progress and file names."""
        return "-".join([self.policy, *self.options_text.split(), f"{self.budget:g}"])

    def system(self) -> System:
        """How to start its server."""
        flags = ("--max-total-tokens", str(POOL_SLOTS), "--random-seed", "42")
        if self.policy == FULL:
            return stock_system(self.name, flags, STRICT_CHECK_ENV)
        policy = "questions" if self.policy == KNOWN_QUESTIONS else self.policy
        config = {"policy": policy, "budget": self.budget, "policy_options": dict(self.options)}
        return kvevict_system(self.name, config, flags, STRICT_CHECK_ENV)


def parse_policy(text: str) -> tuple[str, dict[str, Any]]:
    """``name`` or ``name:option=value,option=value``; values are JSON, or else strings.

    Raises:
        ValueError: an option without a value.
    """
    name, _, rest = text.partition(":")
    options: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"policy {text!r}: got {part!r}; allowed: option=value")
        options[key] = _value(value)
    return name, options


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
