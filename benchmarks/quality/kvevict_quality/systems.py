"""Systems under test, as the command line names them, and the servers for them."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvevict_tools.launcher import STRICT_CHECK_ENV, System, kvevict_system
from sgl_kvevict.config import KVEvictConfig

FULL = "full"
WHILE_PREFILLED = "while-prefilled"
"""The policy ``distilled`` on a pool of ``pool`` token slots (an option), fewer than a context has tokens: its chunks
shrink while it is prefilled."""
OWN_POLICIES = {"knorm": "knorm:knorm", "keydiff": "keydiff:keydiff"}
"""Policies of ``examples/policies``, which are measured beside ours: their dotted paths by name."""
OWN_FOLDER = Path(__file__).parents[3] / "examples" / "policies"
if str(OWN_FOLDER) not in sys.path:
    sys.path.append(str(OWN_FOLDER))
POOL_SLOTS = 26_000


@dataclass(frozen=True)
class Setup:
    """One server to start: the full cache, or a policy with a budget.

    Attributes:
        policy: a policy's name, ``FULL`` or ``WHILE_PREFILLED``.
        budget: share of the bytes; 1.0 for ``FULL``.
        options: of the policy; ``bits`` is the configuration's, ``pool`` is of ``WHILE_PREFILLED``.
        aware: context and question come in one prompt, compressed before the answer.
    """

    policy: str
    budget: float
    options: Mapping[str, Any] = field(default_factory=dict)
    aware: bool = False

    @property
    def options_text(self) -> str:
        """Options as they stand in a row."""
        return " ".join(f"{name}={value}" for name, value in sorted(self.options.items()))

    @property
    def name(self) -> str:
        """For progress and file names."""
        aware = ["aware"] if self.aware else []
        return "-".join([self.policy, *self.options_text.split(), f"{self.budget:g}", *aware])

    @property
    def config(self) -> KVEvictConfig:
        """Of its server, options of the policy included."""
        return KVEvictConfig.model_validate(self._config())

    @property
    def pool_slots(self) -> int:
        """Token slots of its server."""
        if self.policy == WHILE_PREFILLED:
            return int(self.options["pool"])
        return POOL_SLOTS

    def system(self) -> System:
        """How to start its server."""
        flags: tuple[str, ...] = ("--max-total-tokens", str(self.pool_slots), "--random-seed", "42")
        if self.aware:
            flags += ("--disable-overlap-schedule",)
        return kvevict_system(self.name, self._config(), flags, {**STRICT_CHECK_ENV, "PYTHONPATH": str(OWN_FOLDER)})

    def _config(self) -> dict[str, Any]:
        if self.policy == FULL:
            return {"policy": "none"}
        served = OWN_POLICIES | {WHILE_PREFILLED: "distilled"}
        policy = served.get(self.policy, self.policy)
        own = {name: value for name, value in self.options.items() if name in KVEvictConfig.model_fields}
        others = own.keys() | ({"pool"} if self.policy == WHILE_PREFILLED else set())
        options = {name: value for name, value in self.options.items() if name not in others}
        # Without memory of the host: a context that was asked about would get its evicted entries back from there.
        return {"policy": policy, "budget": self.budget, "policy_options": options, "host_bytes": 0} | own


def parse_policy(text: str) -> tuple[str, dict[str, Any]]:
    """``name`` or ``name:option=value,option=value``; values are JSON, or else strings.

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
