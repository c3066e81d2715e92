"""Ratios between systems that were measured in turn, with their spread."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from serving_bench.results import Row


@dataclass(frozen=True)
class Ratio:
    """Median and range of the ratios of several repetitions."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        """``4.12 (3.90-4.30)``."""
        return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"


def values(rows: Sequence[Row], point: str, system: str, metric: str) -> dict[int, float]:
    """A metric by repetition; empty if it was not measured."""
    return {
        row.repetition: row.metrics[metric]
        for row in rows
        if row.point == point and row.system == system and metric in row.metrics
    }


def median(rows: Sequence[Row], point: str, system: str, metric: str) -> float | None:
    """Median over the repetitions; None if it was not measured."""
    found = values(rows, point, system, metric)
    return statistics.median(found.values()) if found else None


def ratio(rows: Sequence[Row], point: str, system: str, metric: str, baseline: str) -> Ratio | None:
    """``system / baseline`` of a metric, repetition by repetition; None without a pair of measurements."""
    ours, theirs = values(rows, point, system, metric), values(rows, point, baseline, metric)
    ratios = [ours[r] / theirs[r] for r in ours if theirs.get(r)]
    return Ratio(statistics.median(ratios), min(ratios), max(ratios)) if ratios else None


def points(rows: Sequence[Row]) -> list[str]:
    """Points in the order of their first row."""
    return list(dict.fromkeys(row.point for row in rows))


def systems(rows: Sequence[Row]) -> list[str]:
    """Systems in the order of their first row."""
    return list(dict.fromkeys(row.system for row in rows))
