"""The systems that are compared, and what is found on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvevict_tools.launcher import STRICT_CHECK_ENV, System, kvevict_system, stock_system

from .programs import Answer
from .rounds import Samples

STOCK, NOTHING_COMPRESSED, OURS = "stock", "nothing compressed", "sgl-kvevict"
BASELINES = (STOCK, NOTHING_COMPRESSED)
"""What ours is compared with: stock, and our own attention with nothing compressed, the stronger of the two."""


@dataclass(frozen=True)
class Figures:
    """What is found once on one system. Token slots and logical tokens are different units."""

    name: str
    prefix_tokens: int
    prefix_slots: int
    sharers: int
    cached_tokens: int
    document_tokens: int
    document_slots: int
    branch_answers: tuple[Answer, ...]
    chat_answers: tuple[Answer, ...]
    checker_complaints: tuple[str, ...]
    leaked_slots: int
    state: Mapping[str, Any] = field(default_factory=dict)

    @property
    def pool_leaks(self) -> int:
        """Complaints of SGLang's checker plus slots that our own accounting misses."""
        return len(self.checker_complaints) + self.leaked_slots

    def documents_that_fit(self, pool_slots: int) -> int:
        """Documents of the working set that a pool holds."""
        return pool_slots // self.document_slots


@dataclass
class Rounds:
    """What is measured in rounds, by system."""

    ttft_cold_s: Samples = field(default_factory=dict)
    ttft_cached_s: Samples = field(default_factory=dict)
    decode_tokens_per_s: Samples = field(default_factory=dict)
    requests_per_s: Samples = field(default_factory=dict)
    found_share: Samples = field(default_factory=dict)


def systems(config: Mapping[str, Any], pool_slots: int) -> tuple[System, ...]:
    """The baselines and ours: same model, same pool of ``pool_slots``; ours as it is by default but for ``config``."""
    flags = (
        *("--max-total-tokens", str(pool_slots), "--random-seed", "42", "--enable-metrics", "--enable-cache-report"),
        "--sleep-on-idle",  # a server that waits must not take a core from the one that is measured
    )
    check = {name: value for name, value in STRICT_CHECK_ENV.items() if name.endswith("IDLE")}
    return (
        stock_system(STOCK, flags, check),
        kvevict_system(NOTHING_COMPRESSED, {"policy": "none"}, flags, check),
        kvevict_system(OURS, config, flags, check),
    )
