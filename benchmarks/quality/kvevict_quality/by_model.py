"""Results of several models side by side, with paired standard errors."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvevict_quality.rows import Row
from kvevict_quality.tables import FULL
from kvevict_quality.tasks import NEEDLE_TASKS


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


def model_table(rows: Sequence[Row]) -> str:
    """One line per model, length and task: the full cache's score, and the share of it that each policy keeps.

    Args:
        rows: with the scores of their questions; the same tasks for all policies of a model, one seed.
    """
    systems = sorted({(-row.budget, row.label) for row in rows if row.policy != FULL})
    heads = ["model", "tokens", "task", "questions", "full", *(f"`{label}` {-budget:g}" for budget, label in systems)]
    lines = [heads, ["---", "--:", "---", *["--:"] * (len(heads) - 3)]]
    by_task: dict[tuple[str, int, str], dict[tuple[float, str], list[float]]] = {}
    for row in rows:
        task = "needles" if row.task in NEEDLE_TASKS else row.task
        found = by_task.setdefault((row.model, row.tokens, task), {})
        found.setdefault((-row.budget, row.label), []).extend(map(float, row.scores.split()))
    for (model, tokens, task), found in sorted(by_task.items()):
        full = found[-1.0, FULL]
        shares = [paired_share(full, found[system]) if system in found else None for system in systems]
        cells = ["" if share is None else f"{100 * share[0]:.0f} ± {100 * share[1]:.0f} %" for share in shares]
        lines.append([model, f"{tokens:,}", f"`{task}`", str(len(full)), f"{sum(full) / len(full):.2f}", *cells])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
