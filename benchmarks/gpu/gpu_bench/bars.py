"""The bars that a run is held to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Rows = list[dict[str, Any]]
COUNTED = "share of copy, temporary counted"
FIRST, FITTING, PRESSED = "ms to first token, cached", "requests/s, fitting", "requests/s, 4 pools"


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


def _least_share_of_copy(count: int) -> Callable[[Rows], float | None]:
    return lambda rows: min(
        (float(row["share of copy"]) for row in _whole(rows) if row["requests"] == count), default=None
    )


def _whole(rows: Rows) -> Rows:
    """Those of 16 bits."""
    return [row for row in rows if row.get("bits", 16) == 16]


def _longest_us(rows: Rows) -> float | None:
    return max((float(row["us per layer"]) for row in rows if row["requests"] == 1), default=None)


def _times_uniform(*counts: int) -> Callable[[Rows], float | None]:
    return lambda rows: _worst([row["times the best"] for row in rows if row["requests"] in counts])


def _question(rows: Rows) -> float | None:
    longest = max((row["prefix tokens"] for row in rows), default=0)
    asked = (longest, 128)
    return _worst([row["times the best"] for row in _whole(rows) if (row["prefix tokens"], row["new tokens"]) == asked])


def _worst(ratios: list[Any]) -> float | None:
    return max((float(ratio) for ratio in ratios if not isinstance(ratio, str)), default=None)


def _servers(column: str, system: str, other: str) -> Callable[[Rows], float | None]:
    """A figure of one server over that of another."""

    def ratio(rows: Rows) -> float | None:
        figures = {row["system"]: row[column] for row in rows}
        pair = [figures.get(name, "not measured") for name in (system, other)]
        return None if any(isinstance(figure, str) for figure in pair) else float(pair[0]) / float(pair[1])

    return ratio


STOCK, OURS, UNCOMPRESSED = "stock, fa3", "budget 0.2", "budget 1.0"
BARS = (
    Bar("decode, 1 request: >= 55 % of a copy", "bandwidth", _least_share_of_copy(1), 0.55, is_cost=False),
    Bar("decode, 8 unshared: >= 80 % of a copy", "bandwidth", _least_share_of_copy(8), 0.8, is_cost=False),
    Bar("decode, 64 unshared: >= 88 % of a copy", "bandwidth", _least_share_of_copy(64), 0.88, is_cost=False),
    Bar("decode, 1 request, 16 and 4 bits: <= 12 us a layer", "bandwidth", _longest_us, 12.0),
    Bar("decode, 1 request: <= 1.25x dense decode", "uniform", _times_uniform(1), 1.25),
    Bar("decode, 8 and 64 unshared: <= 1.1x dense decode", "uniform", _times_uniform(8, 64), 1.1),
    Bar("128 new tokens on the longest prefix: <= 1.5x dense attention", "extend", _question, 1.5),
    Bar("compaction: >= 80 % of a copy's bandwidth", "compaction", _largest(COUNTED), 0.8, is_cost=False),
    Bar("whole compression: <= 3 % of the prefill's stand-in", "compression", _largest("share"), 0.03),
    Bar("64 sharers: <= 1.6x the time of one", "sharers", _largest("times one"), 1.6),
    Bar("error: <= 2x that of torch's bfloat16 attention", "error", _largest("ratio"), 2.0),
    Bar("planning: < 5 % of a step", "planning", _largest("plan / step"), 0.05),
    *(
        Bar(f"server, decode of {count} at 0.2: >= {limit}x {other}", "servers", measure, limit, is_cost=False)
        for count, other, limit in (
            *((1, STOCK, 1.05), (8, STOCK, 1.5), (64, STOCK, 2.5)),
            *((8, UNCOMPRESSED, 1.3), (64, UNCOMPRESSED, 1.3)),
        )
        for measure in [_servers(f"tokens/s, {count}", OURS, other)]
    ),
    Bar("server, first token on a cached document: <= 1.1x stock, fa3", "servers", _servers(FIRST, OURS, STOCK), 1.1),
    Bar(
        "server, documents of 4 pools: >= 4x stock, fa3", "servers", _servers(PRESSED, OURS, STOCK), 4.0, is_cost=False
    ),
    Bar(
        "server, uncompressed documents that fit: >= 0.95x stock, fa3",
        "servers",
        _servers(FITTING, UNCOMPRESSED, STOCK),
        0.95,
        is_cost=False,
    ),
)


def verdicts(sections: dict[str, Rows]) -> Rows:
    """Every bar beside what was measured."""
    rows = []
    for bar in BARS:
        value = bar.measure(sections.get(bar.section, []))
        is_met = value is not None and (value <= bar.limit if bar.is_cost else value >= bar.limit)
        rows.append({"bar": bar.demand, "measured": "not measured" if value is None else value, "met": is_met})
    return rows
