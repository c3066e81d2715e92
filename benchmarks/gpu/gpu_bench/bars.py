"""The bars that a run is held to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Rows = list[dict[str, Any]]
BATCHES = (8, 64)
"""Unshared requests that the bars of decode speak of."""


@dataclass(frozen=True)
class Bar:
    """One demand on the rows of a section.

    Attributes:
        demand: in words, limit included.
        section: whose rows.
        measure: the figure, the worst of those that the demand speaks of; None if they were not measured.
        limit: the bar.
        is_cost: the figure must be at most ``limit``, not at least.
    """

    demand: str
    section: str
    measure: Callable[[Rows], float | None]
    limit: float
    is_cost: bool = True


def _largest(column: str) -> Callable[[Rows], float | None]:
    return lambda rows: max((float(row[column]) for row in rows), default=None)


def _least_share_of_copy(rows: Rows) -> float | None:
    return min((float(row["share of copy"]) for row in rows if row["requests"] in BATCHES), default=None)


def _times_uniform(rows: Rows) -> float | None:
    ratios = [row["triton, us per layer"] / row["flashinfer, uniform"] for row in rows if row["requests"] in BATCHES]
    return max(ratios, default=None)


BARS = (
    Bar("compaction: >= 80 % of a copy's bandwidth", "compaction", _largest("share of copy"), 0.8, is_cost=False),
    Bar("whole compression: <= 3 % of the prefill's stand-in", "compression", _largest("share"), 0.03),
    Bar("decode, 8 and 64 unshared: >= 80 % of a copy", "bandwidth", _least_share_of_copy, 0.8, is_cost=False),
    Bar("decode, 8 and 64 unshared: <= 1.1x FlashInfer's uniform decode", "flashinfer", _times_uniform, 1.1),
    Bar("64 sharers: < 1.5x the time of one", "sharers", _largest("times one"), 1.5),
    Bar("error: <= 2x that of torch's bfloat16 attention", "error", _largest("ratio"), 2.0),
    Bar("planning: < 5 % of a step", "planning", _largest("plan / step"), 0.05),
)


def verdicts(sections: dict[str, Rows]) -> Rows:
    """Every bar beside what was measured."""
    rows = []
    for bar in BARS:
        value = bar.measure(sections.get(bar.section, []))
        is_met = value is not None and (value <= bar.limit if bar.is_cost else value >= bar.limit)
        rows.append({"bar": bar.demand, "measured": "not measured" if value is None else value, "met": is_met})
    return rows
