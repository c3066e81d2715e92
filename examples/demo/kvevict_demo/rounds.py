"""What was measured round by round: medians, ranges and ratios."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

Samples = dict[str, list[float]]
"""Measured values by system, round by round."""


@dataclass(frozen=True)
class Spread:
    """Median and range of several rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarise at least one value."""
        return cls(statistics.median(values), min(values), max(values))

    def text(self, digits: int) -> str:
        """``4.1 (3.9-4.3)``; the median alone if all rounds gave the same."""
        median, low, high = (f"{value:,.{digits}f}" for value in (self.median, self.low, self.high))
        return median if low == high else f"{median} ({low}-{high})"


def ratio(samples: Samples, ours: str, baseline: str) -> Spread:
    """``ours`` over ``baseline``, round by round.

    Raises:
        ValueError: different numbers of rounds, or none.
    """
    pairs = list(zip(samples[ours], samples[baseline], strict=True))
    if not pairs:
        raise ValueError(f"no rounds of {ours} and {baseline}")
    return Spread.of([mine / theirs for mine, theirs in pairs])
