"""How well the divergence of contexts from the full cache on their own text predicts the loss of answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from scipy.stats import spearmanr

from kvevict_quality.rows import Row
from kvevict_quality.tables import FULL


@dataclass(frozen=True)
class Point:
    """One context after compression.

    Attributes:
        divergence: from the full cache where it repeats itself, nats.
        loss: mean score of the full cache on its questions, less its own.
    """

    model: str
    task: str
    label: str
    budget: float
    divergence: float
    loss: float


def points(rows: Sequence[Row]) -> list[Point]:
    """Contexts of all rows with divergences of which the full cache answers something."""
    full = {(row.model, row.task, row.tokens, row.seed): _by_context(row) for row in rows if row.policy == FULL}
    return [
        Point(row.model, row.task, row.label, row.budget, float(divergence), before - after)
        for row in rows
        if row.policy != FULL and row.divergences
        for divergence, before, after in zip(
            row.divergences.split(), full[row.model, row.task, row.tokens, row.seed], _by_context(row), strict=True
        )
        if before
    ]


def _by_context(row: Row) -> list[float]:
    scores = [float(score) for score in row.scores.split()]
    size = len(scores) // row.contexts
    return [fmean(scores[i : i + size]) for i in range(0, len(scores), size)]


def prediction_table(found: Sequence[Point]) -> str:
    """Spearman's rank correlation of divergence and loss, over contexts, and over means of a task at a budget."""
    lines = ["| model | points | contexts: number | correlation | task x budget: number | correlation |"]
    lines.append("|---|---|--:|--:|--:|--:|")
    kinds: dict[str, Callable[[Point], bool]] = {"all": lambda _: True}
    for label, budget in sorted({(point.label, -point.budget) for point in found}):
        kinds[f"`{label}`"] = lambda point, label=label: point.label == label
        kinds[f"`{label}` {-budget:g}"] = lambda point, system=(label, -budget): (point.label, point.budget) == system
    kinds |= {f"`{task}`": lambda point, task=task: point.task == task for task in _sorted(found, "task")}
    for model in _sorted(found, "model"):
        for name, belongs in kinds.items():
            chosen = [point for point in found if point.model == model and belongs(point)]
            if len(chosen) < 3:
                continue
            groups: dict[tuple[str, str, float], list[Point]] = {}
            for point in chosen:
                groups.setdefault((point.task, point.label, point.budget), []).append(point)
            means = [(fmean(p.divergence for p in group), fmean(p.loss for p in group)) for group in groups.values()]
            single = _correlation([(point.divergence, point.loss) for point in chosen])
            cells = [model, name, str(len(chosen)), single, str(len(means)), _correlation(means)]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _sorted(found: Sequence[Point], name: str) -> list[str]:
    return sorted({getattr(point, name) for point in found})


def _correlation(pairs: Sequence[tuple[float, float]]) -> str:
    columns = list(zip(*pairs, strict=True))
    if len(pairs) < 3 or any(len({*column}) == 1 for column in columns):
        return ""
    return f"{spearmanr(*columns).statistic:.2f}"


def draw(found: Sequence[Point], path: Path) -> None:
    """Write the picture: a colour for each task, a marker for each policy, a panel for each model."""
    models, tasks, labels = (_sorted(found, name) for name in ("model", "task", "label"))
    figure, panels = plt.subplots(
        1, len(models), figsize=(1 + 5.5 * len(models), 5), layout="constrained", squeeze=False
    )
    for axes, model in zip(panels[0], models, strict=True):
        for i, task in enumerate(tasks):
            for label, marker in zip(labels, "oxs^v", strict=False):
                chosen = [p for p in found if (p.model, p.task, p.label) == (model, task, label)]
                axes.plot(
                    [p.divergence for p in chosen],
                    [p.loss for p in chosen],
                    marker,
                    color=f"C{i}",
                    alpha=0.7,
                    label=f"{task}, {label}",
                )
        axes.set(xscale="log", xlabel="divergence on its own text (nats)", ylabel="loss of score", title=model)
        axes.grid(alpha=0.3)
    panels[0][-1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=110)
    plt.close(figure)
