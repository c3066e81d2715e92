"""Rows of results, the CSV file that holds them, and where they came from."""

from __future__ import annotations

import csv
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from kvevict_quality.origin import commit

from sgl_kvevict.machine import has_fast_bfloat16

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "docs" / "results" / "serving"
_KEYS = ("point", "system", "repetition")
_ORIGIN = ("date", "commit", "machine", "versions", "options")
_PACKAGES = ("sglang", "torch", "sgl-kvevict")


@dataclass(frozen=True)
class Row:
    """What one system did at one point of a benchmark in one repetition.

    Attributes:
        point: what was run, for example ``"prefix 4096, batch 8"``.
        system: name of the system.
        repetition: counted from 1; rows of one repetition were measured in turn.
        metrics: figures by name; the unit is part of the name.
        origin: date, commit, machine, versions and options of the run.
    """

    point: str
    system: str
    repetition: int
    metrics: dict[str, float]
    origin: dict[str, str] = field(default_factory=dict)


def origin(options: str) -> dict[str, str]:
    """Where a run comes from: UTC date, commit (``+`` if files were changed), machine, versions, and its options."""
    dtype = "bfloat16" if has_fast_bfloat16() else "float32"
    load = os.getloadavg()[1]
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
        "commit": commit(),
        "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}, {dtype}, load {load:.1f} at the start",
        "versions": ", ".join(f"{name} {version(name)}" for name in _PACKAGES),
        "options": options,
    }


def read_rows(path: Path) -> list[Row]:
    """Read a CSV file of rows; none if it does not exist."""
    if not path.exists():
        return []
    rows = []
    with path.open(newline="", encoding="utf-8") as file:
        for record in csv.DictReader(file):
            metrics = {k: float(v) for k, v in record.items() if k not in (*_KEYS, *_ORIGIN) and v != ""}
            source = {k: record[k] for k in _ORIGIN}
            rows.append(Row(record["point"], record["system"], int(record["repetition"]), metrics, source))
    return rows


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write rows as CSV, one column for each metric that any of them has."""
    names = list(dict.fromkeys(name for row in rows for name in row.metrics))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*_KEYS, *names, *_ORIGIN])
        for row in rows:
            cells = [f"{row.metrics[name]:.6g}" if name in row.metrics else "" for name in names]
            writer.writerow([row.point, row.system, row.repetition, *cells, *(row.origin.get(k, "") for k in _ORIGIN)])


def replace_points(old: Sequence[Row], new: Sequence[Row], order: Iterable[str]) -> list[Row]:
    """Rows of the points that were just measured take the place of older ones; sorted by ``order`` of points.

    Points that are not in ``order`` (any more) are left out.
    """
    measured = {row.point for row in new}
    rows = [row for row in old if row.point not in measured] + list(new)
    places = {point: i for i, point in enumerate(order)}
    return sorted((row for row in rows if row.point in places), key=lambda row: places[row.point])
