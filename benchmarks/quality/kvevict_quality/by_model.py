"""Results of several models side by side, with paired standard errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from kvevict_quality.rows import Row
from kvevict_quality.tables import FULL
from kvevict_quality.tasks import NEEDLE_TASKS

_Scores = dict[tuple[str, int, int], float]
"""By task, seed and number of the question."""


def paired_share(full: Sequence[float], scores: Sequence[float]) -> tuple[float, float]:
    """Share of the full cache's score, and its standard error, from the scores of the same questions.

    Raises:
        ValueError: not the same questions, or the full cache answers none.
    """
    if len(full) != len(scores) or not sum(full):
        raise ValueError(f"scores: got {len(scores)} beside {len(full)} of the full cache; allowed: as many, not all 0")
    share = sum(scores) / sum(full)
    squares = sum((score - share * reference) ** 2 for score, reference in zip(scores, full, strict=True))
    return share, math.sqrt(squares) / sum(full)


def _cell(full: _Scores, scores: _Scores) -> str:
    if not scores:
        return ""
    share, error = paired_share([full[question] for question in scores], [*scores.values()])
    return f"{100 * share:.0f} ± {100 * error:.0f} %"


def model_table(rows: Sequence[Row]) -> str:
    """One line per model, length and task: the full cache's score, and the share of it that each policy keeps.

    Args:
        rows: with the scores of their questions; a policy is compared over the questions that it was asked.
    """
    systems = sorted({(-row.budget, row.label) for row in rows if row.policy != FULL})
    heads = ["model", "tokens", "task", "questions", "full", *(f"`{label}` {-budget:g}" for budget, label in systems)]
    lines = [heads, ["---", "--:", "---", *["--:"] * (len(heads) - 3)]]
    by_task: dict[tuple[str, int, str], dict[tuple[float, str], _Scores]] = {}
    for row in rows:
        task = "needles" if row.task in NEEDLE_TASKS else row.task
        found = by_task.setdefault((row.model, row.tokens, task), {}).setdefault((-row.budget, row.label), {})
        found |= {(row.task, row.seed, i): float(score) for i, score in enumerate(row.scores.split())}
    for (model, tokens, task), by_system in sorted(by_task.items()):
        full = by_system[-1.0, FULL]
        cells = [_cell(full, by_system.get(system, {})) for system in systems]
        lines.append([model, f"{tokens:,}", f"`{task}`", str(len(full)), f"{fmean(full.values()):.2f}", *cells])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
