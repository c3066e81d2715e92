"""CSV, Markdown and picture of measured costs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from kvevict_tools.csv_rows import write_records
from policy_bench.measure import Cost


def write_report(costs: list[Cost], folder: Path, budget: float, machine: str) -> None:
    """Write policies-cost.csv, .md and .png."""
    write_records(folder / "policies-cost.csv", Cost, costs, ".5f")
    (folder / "policies-cost.md").write_text(markdown(costs, budget, machine), encoding="utf-8")
    draw(costs, folder / "policies-cost.png")


def markdown(costs: list[Cost], budget: float, machine: str) -> str:
    """The report."""
    lengths = sorted({cost.tokens for cost in costs})
    prefills = {cost.tokens: cost.prefill_s for cost in costs}
    lines = [
        "# What the policies cost",
        "",
        f"Written by `python benchmarks/policies/run.py`: SmolLM2-135M-Instruct, budget {budget}, {machine}.",
        "Prefill: " + ", ".join(f"{length:,} tokens {prefills[length]:.2f} s" for length in lengths) + ".",
        "",
        "Times are CPU seconds of all threads (the cores were shared with other work), the smallest of the repeats.",
        "Time is that of the signals kept in the forward pass, scores, selection and compaction together, a share of",
        "the prefill; memory is the most that they hold at a time, signals included, as a share of the prompt's KV.",
        "Growth: time ~ length^x, memory ~ length^y, from the shortest to the longest prompt (the prefill grows with "
        f"x = {growth(prefills[lengths[0]], prefills[lengths[-1]], lengths):.1f}).",
        "",
        "| policy | " + " | ".join(f"time, {n:,} | memory, {n:,}" for n in lengths) + " | growth |",
        "|---|" + "--:|--:|" * len(lengths) + "---|",
    ]
    rows = by_policy(costs)
    for name, found in rows.items():
        cells = [f"{100 * found[n].time_share:.1f} % | {100 * found[n].memory_share:.1f} %" for n in lengths]
        first, last = found[lengths[0]], found[lengths[-1]]
        time = growth(first.seconds, last.seconds, lengths)
        memory = growth(first.peak_bytes, last.peak_bytes, lengths)
        lines.append(f"| `{name}` | {' | '.join(cells)} | x = {time:.1f}, y = {memory:.1f} |")
    lines += ["", *steps(rows, lengths), "", *reuse(rows, lengths), "", "![Cost over length](policies-cost.png)", ""]
    return "\n".join(lines)


def steps(rows: dict[str, dict[int, Cost]], lengths: list[int]) -> list[str]:
    """Table of the steps at the middle length."""
    length = lengths[len(lengths) // 2]
    lines = [
        f"Where it goes at {length:,} tokens (milliseconds), and what the forward pass keeps (bytes per token):",
        "",
        "| policy | signals in the forward | scores, selection, merge plan | compaction | kept |",
        "|---|--:|--:|--:|--:|",
    ]
    for name, found in rows.items():
        cost = found[length]
        times = [f"{1000 * seconds:.0f}" for seconds in (cost.signals_s, cost.decide_s, cost.compact_s)]
        lines.append(f"| `{name}` | {' | '.join(times)} | {cost.kept_bytes / length:.0f} |")
    return lines


def reuse(rows: dict[str, dict[int, Cost]], lengths: list[int]) -> list[str]:
    """What ChunkKV saves by layer-wise index reuse."""
    lines = ["ChunkKV's layer-wise index reuse: time of scores and selection against that without reuse:", ""]
    lines += ["| layers per choice | " + " | ".join(f"{n:,}" for n in lengths) + " |", "|---|" + "--:|" * len(lengths)]
    for name, found in rows.items():
        if not name.startswith("chunkkv "):
            continue
        saved = [1 - found[n].decide_s / rows["chunkkv"][n].decide_s for n in lengths]
        lines.append(f"| {name.split('=')[1]} | " + " | ".join(f"-{100 * share:.0f} %" for share in saved) + " |")
    return lines


def growth(first: float, last: float, lengths: list[int]) -> float:
    """Exponent of a power law through the shortest and the longest prompt."""
    if len(lengths) < 2:
        return math.nan
    return math.log(last / first) / math.log(lengths[-1] / lengths[0])


def by_policy(costs: list[Cost]) -> dict[str, dict[int, Cost]]:
    """Costs by policy and length."""
    rows: dict[str, dict[int, Cost]] = {}
    for cost in costs:
        rows.setdefault(cost.policy, {})[cost.tokens] = cost
    return rows


def draw(costs: list[Cost], path: Path) -> None:
    """Time and memory shares over the length, one line a policy."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), layout="constrained")
    FigureCanvasAgg(figure)
    time, memory = figure.subplots(1, 2)
    markers = "osv^D<>pPX*hd"
    for i, (name, found) in enumerate(by_policy(costs).items()):
        if "=" in name:
            continue
        style: dict[str, Any] = {"marker": markers[i % len(markers)], "markersize": 5, "label": name}
        lengths = sorted(found)
        time.plot(lengths, [100 * found[n].time_share for n in lengths], **style)
        memory.plot(lengths, [100 * found[n].memory_share for n in lengths], **style)
    time.set_ylabel("time, % of the prefill")
    time.set_yscale("log")
    memory.set_ylabel("peak extra memory, % of the prompt's KV")
    memory.set_ylim(bottom=0)
    for axes in (time, memory):
        axes.set_xlabel("prompt length (tokens)")
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
    memory.legend(fontsize=8)
    figure.savefig(path, dpi=110)
