"""The command line that all serving benchmarks share."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from kvevict_tools.launcher import System
from kvevict_tools.models import ensure_model
from serving_bench.fleet import running
from serving_bench.page import Page, write_page
from serving_bench.results import RESULTS, ROOT, Row, origin, read_rows, replace_points, write_rows

LOGS = ROOT / "out" / "serving"
MIN_REPEATS = 5
"""Repetitions of every published ratio."""
MAX_BUSY_PCT = 10.0
"""What others may use of the processor before a run whose figures are published."""
BUSY_SAMPLE_S = 3.0


@dataclass(frozen=True)
class Options:
    """Parsed options.

    Attributes:
        beside: policies or settings that are measured beside the default configuration.
        repeats: repetitions.
        quick: few small points.
        only: the name of a point, or a part of the names of several.
        model: its folder.
        out: folder of the results.
        busy_pct: what others used of the processor before the run, in percent; None: not looked at.
    """

    beside: tuple[str, ...]
    repeats: int
    quick: bool
    only: str
    model: Path
    out: Path
    busy_pct: float | None = None

    def chosen(self, points: Sequence[str]) -> list[str]:
        """The points to measure."""
        found = [point for point in points if point == self.only] or [point for point in points if self.only in point]
        if not found:
            raise SystemExit(f"--only {self.only!r}: no such point; there are {', '.join(points)}")
        return found

    @property
    def text(self) -> str:
        """What a reader must know to repeat the run."""
        busy = "" if self.busy_pct is None else f", others used {self.busy_pct:.0f} % of the processor before"
        beside = "".join(f", beside {policy}" for policy in self.beside)
        return f"{self.repeats} repetitions, each server alone" + beside + (", quick" if self.quick else "") + busy


def parse_options(description: str, repeats: int = MIN_REPEATS) -> Options:
    """Read the command line; prepares the demo model where none is given.

    Args:
        description: of the benchmark.
        repeats: what its published figures need; fewer only where nothing is compared.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    beside = "policies, or settings like host_bytes=0, to measure beside the default configuration"
    parser.add_argument("--beside", nargs="*", default=[], help=beside)
    parser.add_argument("--repeats", type=int, default=repeats, help="repetitions; ratios show their spread")
    parser.add_argument("--quick", action="store_true", help="few small points; results go to out/, not to docs/")
    parser.add_argument("--only", default="", help="a point, or a part of points' names; others keep their rows")
    parser.add_argument("--model", type=Path, default=None, help="model folder; default: the demo model")
    parser.add_argument("--out", type=Path, default=None, help="folder of CSV, plot and page")
    args = parser.parse_args()
    model = args.model or ensure_model(report=lambda text: print(text, file=sys.stderr))
    busy_pct = psutil.cpu_percent(BUSY_SAMPLE_S)
    reason = "--quick" if args.quick else reason_not_to_publish(args.repeats, repeats, busy_pct)
    if args.out is None and reason is not None:
        print(f"results go to {LOGS}, not to the documentation: {reason}", file=sys.stderr)
    out = args.out or (RESULTS if reason is None else LOGS)
    return Options(tuple(args.beside), args.repeats, args.quick, args.only, model, out, busy_pct)


def reason_not_to_publish(repeats: int, needed: int, busy_pct: float) -> str | None:
    """Why the figures of a run do not belong into the documentation; None if they do.

    Args:
        repeats: of the run.
        needed: repetitions at least.
        busy_pct: what others use of the processor, in percent.
    """
    if repeats < needed:
        return f"{repeats} repetitions, at least {needed} are needed"
    if busy_pct > MAX_BUSY_PCT:
        return f"others use {busy_pct:.0f} % of the processor, at most {MAX_BUSY_PCT:.0f} % are allowed"
    return None


class Recorder:
    """Collects rows, tells progress, and writes CSV, plot and page.

    Args:
        page: what the page looks like.
        options: of the run.
        points: all points that the benchmark has, in their order.
    """

    def __init__(self, page: Page, options: Options, points: Sequence[str]) -> None:
        self.page = page
        self.options = options
        self.points = points
        self.rows: list[Row] = []
        self._path = options.out / f"{page.name}.csv"
        self._origin = origin(options.text)
        self._started = time.monotonic()

    def progress(self, text: str) -> None:
        """Tell what happens, on stderr."""
        print(f"{time.monotonic() - self._started:6.0f} s  {self.page.name}: {text}", file=sys.stderr, flush=True)

    def add(self, point: str, system: str, repetition: int, metrics: dict[str, float]) -> None:
        """Record one measurement."""
        self.rows.append(Row(point, system, repetition, metrics, self._origin))
        shown = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        self.progress(f"{point}, {system}, repetition {repetition}: {shown}")
        self._save()

    def close(self) -> list[Row]:
        """Write what was measured, beside what is there of other points; returns all rows."""
        rows = self._save()
        print(write_page(self.page, rows, self.options.out).read_text(encoding="utf-8"))
        self.progress(f"wrote {self._path}")
        return rows

    def _save(self) -> list[Row]:
        rows = replace_points(read_rows(self._path), self.rows, self.points)
        write_rows(self._path, rows)
        return rows


def measure_points(
    page: Page, options: Options, points: Sequence[Any], systems: Sequence[System], measure: Callable[..., None]
) -> None:
    """Measure the points that are chosen by their names, one after the other, beside the same running servers."""
    by_name = {point.name: point for point in points}
    recorder = Recorder(page, options, list(by_name))
    with running(systems, options.model, LOGS / page.name, recorder.progress) as fleet:
        for name in options.chosen(recorder.points):
            measure(fleet, by_name[name], recorder)
    recorder.close()
