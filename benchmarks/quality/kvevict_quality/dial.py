"""The dial: share of the full cache's answers over share of its bytes, a line for each number of bits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from kvevict_quality.by_model import DEFAULT_POLICY, paired_share
from kvevict_quality.rows import Row
from kvevict_quality.systems import FULL

TASKS = ("needle-multi-key", "table", "squad")
"""What every model was asked at every point; a point without one of them is left out."""
TOKENS = 1024
BITS: Mapping[str, str] = {"": "auto", "bits=16": "16"}
"""Configured ``bits`` by the options of a row."""
LABELS = {"auto": "4 bits (`auto`, the default)", "16": "16 bits"}
STYLES = {"auto": ("o", "tab:blue"), "16": ("x", "tab:orange")}
WIDTH, HEIGHT = 4.2, 3.8
"""Of a model's panel, in inches."""


@dataclass(frozen=True)
class Point:
    """What a model's answers are worth at one number of bytes.

    Attributes:
        model: folder's name.
        bits: as configured: "auto" or "16".
        budget: as configured; 1.0 is the full cache.
        bytes_share: bytes held over those of the full cache.
        questions: of all tasks.
        share: of the full cache's score over all questions.
        error: standard error of ``share``, of the same questions.
    """

    model: str
    bits: str
    budget: float
    bytes_share: float
    questions: int
    share: float
    error: float


def points(rows: Sequence[Row]) -> list[Point]:
    """All points whose tasks were all measured, by model and bits, fewest bytes first; lines end at the full cache.

    The full cache may have been asked more questions, behind those of a point; these do not count.

    Args:
        rows: of this plugin's server, with the scores of their questions and one seed.
    """
    by_system: dict[tuple[str, str, str, float], dict[str, Row]] = {}
    for row in rows:
        if (row.engine, row.tokens) == ("kvevict", TOKENS) and row.task in TASKS:
            by_system.setdefault((row.model, row.policy, row.options, row.budget), {})[row.task] = row
    found = []
    for (model, policy, options, budget), tasks in sorted(by_system.items()):
        full = by_system.get((model, FULL, "", 1.0), {})
        if policy != DEFAULT_POLICY or options not in BITS or not set(TASKS) <= tasks.keys() & full.keys():
            continue
        measured = [tasks[task] for task in TASKS]
        asked = [full[task].scores.split()[: tasks[task].questions] for task in TASKS]
        share, error = paired_share(_numbers(asked), _numbers(row.scores.split() for row in measured))
        held = sum(row.slots for row in measured) / sum(row.context_tokens for row in measured)
        questions = sum(row.questions for row in measured)
        found.append(Point(model, BITS[options], budget, round(held, 4), questions, round(share, 4), round(error, 4)))
    lines = dict.fromkeys((point.model, point.bits, point.questions) for point in found)
    found += [Point(model, bits, 1.0, 1.0, questions, 1.0, 0.0) for model, bits, questions in lines]
    return sorted(found, key=lambda point: (point.model, point.bits, point.bytes_share))


def _numbers(words: Iterable[Sequence[str]]) -> list[float]:
    return [float(word) for of_task in words for word in of_task]


def draw(found: Sequence[Point], path: Path) -> None:
    """Write the picture: a panel for each model, bytes on the x axis, a line for each number of bits."""
    models = sorted({point.model for point in found})
    figure, panels = plt.subplots(
        1, len(models), figsize=(WIDTH * len(models), HEIGHT), layout="constrained", sharey=True, squeeze=False
    )
    for axes, model in zip(panels[0], models, strict=True):
        for bits, label in LABELS.items():
            line = [point for point in found if (point.model, point.bits) == (model, bits)]
            if not line:
                continue
            marker, colour = STYLES[bits]
            shown = ([100 * getattr(point, name) for point in line] for name in ("bytes_share", "share", "error"))
            x, y, error = shown
            axes.errorbar(x, y, error, marker=marker, color=colour, label=label, capsize=3, linewidth=1.6)
        axes.axhline(100, color="black", linewidth=0.8)
        axes.set_xscale("log")
        axes.set_xlim(6, 110)
        axes.set_xticks([7, 10, 20, 50, 100], ["7 %", "10 %", "20 %", "50 %", "100 %"])
        axes.minorticks_off()
        axes.set_title(model, fontsize=10)
        axes.set_xlabel("KV bytes held, of the full cache's")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, loc="lower right")
    panels[0][0].set_ylabel("score on needles, table and SQuAD,\n% of the full cache's")
    panels[0][0].set_ylim(0, 120)
    figure.savefig(path, dpi=130)
    plt.close(figure)
