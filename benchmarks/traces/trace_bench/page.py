"""The page and the plot of a run."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from statistics import median

from trace_bench.rows import Row


def write_page(path: Path, rows: Sequence[Row], about: str) -> None:
    """Write the tables, medians over the seeds, beside the CSV and the plot of the same name."""
    tables = [
        ("Prompt tokens found, % (pool; with a host tier pool and host)", lambda row: f"{100 * row.found:.1f}"),
        ("Seconds of prefill and of loads, to stock with LRU at the same memory", None),
        ("Seconds from a request to its first token, median", lambda row: f"{row.first_token_s:.1f}"),
        ("Kept of the tokens found: bytes / entries, %, bits of a number", _kept),
    ]
    shares = sorted({row.share for row in rows})
    lines = ["# Conversations of coding agents", "", about, "", f"![tokens found and prefill]({path.stem}.png)", ""]
    for title, cell in tables:
        lines += [f"## {title}", "", "| system | " + " | ".join(f"{Fraction(share)}" for share in shares) + " |"]
        lines.append("|---|" + "--:|" * len(shares))
        for system in dict.fromkeys(row.system for row in rows):
            cells = [_cell(rows, system, share, cell) for share in shares]
            lines.append(f"| {system} | " + " | ".join(cells) + " |")
        lines.append("")
    path.write_text("\n".join([*lines, *_memory_needed(rows)]) + "\n", encoding="utf-8")


def middle(rows: Sequence[Row], system: str, share: float) -> Row | None:
    """The row of a system at a share of the working set: medians over the seeds; None: there is none."""
    same = [row for row in rows if row.system == system and row.share == share]
    return Row.median(same) if same else None


def _cell(rows: Sequence[Row], system: str, share: float, show: object) -> str:
    row = middle(rows, system, share)
    if row is None:
        return ""
    if callable(show):
        return str(show(row))
    ratios = [
        one.busy_s / other.busy_s
        for one in rows
        for other in rows
        if (one.system, one.share) == (system, share)
        and (other.system, other.share, other.seed) == ("stock, LRU", share, one.seed)
    ]
    return f"{median(ratios):.2f}x" if ratios else ""


def _kept(row: Row) -> str:
    return f"{100 * row.kept_bytes:.0f} / {100 * row.kept_entries:.0f}, {row.kept_bits:.1f}"


def _memory_needed(rows: Sequence[Row]) -> list[str]:
    """Memory with which each system finds what stock finds, by straight lines between the points."""
    lines = ["## Memory to find as much as stock with LRU", ""]
    lines += [
        "| system | " + " | ".join(f"stock at {Fraction(share)}" for share in sorted({r.share for r in rows})) + " |"
    ]
    lines.append("|---|" + "--:|" * len({row.share for row in rows}))
    for system in dict.fromkeys(row.system for row in rows):
        cells = []
        for share in sorted({row.share for row in rows}):
            target = middle(rows, "stock, LRU", share)
            needed = None if target is None else _share_for(rows, system, target.found)
            cells.append("" if needed is None else needed if isinstance(needed, str) else f"{needed / share:.2f}x")
        lines.append(f"| {system} | " + " | ".join(cells) + " |")
    return lines


def _share_for(rows: Sequence[Row], system: str, found: float) -> float | str | None:
    """Share of the working set with which a system finds so much; a text: less than the smallest one measured."""
    points = [
        (row.share, row.found) for share in sorted({r.share for r in rows}) if (row := middle(rows, system, share))
    ]
    if not points or points[-1][1] < found:
        return None
    if points[0][1] >= found:
        return f"< {Fraction(points[0][0])}"
    for (x, y), (x_after, y_after) in pairwise(points):
        if y < found <= y_after:
            return float(x * (x_after / x) ** ((found - y) / (y_after - y)))
    return None


def draw(path: Path, rows: Sequence[Row], mark: tuple[float, str]) -> None:
    """Draw tokens found, and seconds of prefill, over the pool's share of the working set; ``mark``: a share, named."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (found, seconds) = pyplot.subplots(1, 2, figsize=(12, 4.5))
    shares = sorted({row.share for row in rows})
    for number, system in enumerate(dict.fromkeys(row.system for row in rows)):
        points = [row for share in shares if (row := middle(rows, system, share)) is not None]
        style = {"linestyle": "--" if system.startswith("stock") else "-", "color": f"C{number % 10}", "marker": "."}
        found.plot([row.share for row in points], [100 * row.found for row in points], label=system, **style)
        seconds.plot([row.share for row in points], [row.busy_s for row in points], **style)
    for axes in (found, seconds):
        axes.set_xscale("log", base=2)
        axes.set_xticks(shares, [str(Fraction(share)) for share in shares])
        axes.set_xlabel("pool, share of the working set")
        axes.axvline(mark[0], color="lightgrey", zorder=0)
        axes.grid(alpha=0.3)
    found.set_ylabel("prompt tokens found, %")
    seconds.set_ylabel("seconds of prefill and loads")
    seconds.set_yscale("log")
    found.annotate(mark[1], (mark[0], 2), fontsize=7, rotation=90, ha="right")
    found.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
