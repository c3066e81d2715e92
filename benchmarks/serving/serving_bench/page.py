"""The Markdown page and the plot of one benchmark, made from its rows alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from serving_bench.compare import median, points, ratio, systems
from serving_bench.results import Row


@dataclass(frozen=True)
class Table:
    """One table of a page: points down, systems across.

    Attributes:
        metric: name of the metric.
        title: heading, with the unit.
        has_ratio: add the ratio to the baseline behind every other system's median.
        digits: digits after the decimal point.
        baseline: system that ratios refer to; None: the page's.
    """

    metric: str
    title: str
    has_ratio: bool = True
    digits: int = 2
    baseline: str | None = None


REQUESTS = Table("requests_per_s", "Requests/s")
FIRST_TOKEN = Table("ttft_ms", "First token, median ms", digits=0)
HIT_RATE = Table("hit_rate_pct", "Prompt tokens found in the cache, %", has_ratio=False, digits=0)
"""Tables of several benchmarks."""


@dataclass(frozen=True)
class Page:
    """What one benchmark's page consists of.

    Attributes:
        name: name of the benchmark and of its files.
        command: what produced the rows.
        summary: plain sentences on what is measured.
        tables: in this order; the first one is plotted.
        baseline: system that ratios refer to.
    """

    name: str
    command: str
    summary: str
    tables: tuple[Table, ...]
    baseline: str = "stock"


def write_page(page: Page, rows: Sequence[Row], folder: Path) -> Path:
    """Write ``NAME.md`` and ``NAME.png`` beside ``NAME.csv``; returns the page's path."""
    draw(page, rows, folder / f"{page.name}.png")
    path = folder / f"{page.name}.md"
    path.write_text(markdown(page, rows), encoding="utf-8")
    return path


def markdown(page: Page, rows: Sequence[Row]) -> str:
    """The page as text."""
    parts = [f"# {page.name}", page.summary]
    measured = [table for table in page.tables if any(table.metric in row.metrics for row in rows)]
    parts += [f"## {table.title}\n\n{table_markdown(page, table, rows)}" for table in measured]
    parts += [f"![{page.tables[0].title}]({page.name}.png)", "## Origin", _origin_markdown(page, rows)]
    return "\n\n".join(parts) + "\n"


def table_markdown(page: Page, table: Table, rows: Sequence[Row]) -> str:
    """One table: medians, and ratios to the baseline as ``median (lowest-highest)`` of the repetitions."""
    names = [name for name in systems(rows) if any(table.metric in r.metrics for r in rows if r.system == name)]
    lines = ["| | " + " | ".join(names) + " |", "|---|" + "--:|" * len(names)]
    for point in points(rows):
        cells = [_cell(page, table, rows, point, name) for name in names]
        if any(cells):
            lines.append(f"| {point} | " + " | ".join(cells) + " |")
    baseline = table.baseline or page.baseline
    note = f"Medians; ratios to {baseline} as median (lowest-highest) of repetitions measured in turn."
    return "\n".join(lines) + (f"\n\n{note}" if table.has_ratio and len(names) > 1 else "")


def _cell(page: Page, table: Table, rows: Sequence[Row], point: str, system: str) -> str:
    value = median(rows, point, system, table.metric)
    if value is None:
        return ""
    text = f"{value:,.{table.digits}f}"
    baseline = table.baseline or page.baseline
    found = ratio(rows, point, system, table.metric, baseline)
    if not table.has_ratio or system == baseline or found is None:
        return text
    spread = f" ({found.low:.2f}-{found.high:.2f})" if found.low < found.high else ""
    return f"{text} = **{found.median:.2f}x**{spread}"


def _origin_markdown(page: Page, rows: Sequence[Row]) -> str:
    origins = list(dict.fromkeys(tuple(row.origin.items()) for row in rows))
    shown = [dict(items) for items in origins]
    lines = [f"`{page.command}`; all figures: [{page.name}.csv]({page.name}.csv).", ""]
    lines += ["| date (UTC) | commit | machine | versions | options |", "|---|---|---|---|---|"]
    for one in shown:
        lines.append("| " + " | ".join(one.get(k, "") for k in ("date", "commit", "machine", "versions")) + " |")
        lines[-1] += f" {one.get('options', '')} |"
    return "\n".join(lines)


def draw(page: Page, rows: Sequence[Row], path: Path) -> None:
    """Bars of the first table's metric, points across, one colour for each system; whiskers show the range."""
    table = page.tables[0]
    all_points = [p for p in points(rows) if any(table.metric in r.metrics for r in rows if r.point == p)]
    names = systems(rows)
    figure, axes = pyplot.subplots(figsize=(max(7.0, 1.3 * len(all_points)), 3.8), layout="constrained")
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        places, heights, below, above = [], [], [], []
        for j, point in enumerate(all_points):
            found = [
                r.metrics[table.metric]
                for r in rows
                if (r.point, r.system) == (point, name) and table.metric in r.metrics
            ]
            if found:
                middle = sorted(found)[len(found) // 2]
                places.append(j + (i - (len(names) - 1) / 2) * width)
                heights.append(middle)
                below.append(middle - min(found))
                above.append(max(found) - middle)
        axes.bar(places, heights, width, yerr=[below, above], label=name, error_kw={"linewidth": 0.8})
    axes.set_xticks(range(len(all_points)), [p.replace(", ", "\n") for p in all_points], fontsize=8)
    axes.set_ylabel(table.title, fontsize=8)
    axes.set_title(page.name, fontsize=10)
    axes.legend(fontsize=8)
    axes.grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
