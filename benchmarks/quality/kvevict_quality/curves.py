"""The plot: score over kept share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from kvevict_quality.rows import Row
from kvevict_quality.tables import FULL, full_rows, relative, systems


def curves(rows: Sequence[Row]) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """(kept share, share of the full cache's score) of each (engine, label), by kept share."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for (engine, label, _), group in systems(rows).items():
        score = relative(group, full_rows(rows, engine))
        if label != FULL and score is not None:
            kept = sum(row.slots for row in group) / sum(row.context_tokens for row in group)
            found.setdefault((engine, label), []).append((kept, score))
    return {name: sorted(points) for name, points in found.items()}


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write the picture: our policies as full lines, peers dashed."""
    figure, axes = plt.subplots(figsize=(10, 6), layout="constrained")
    lines = curves(rows)
    ranking = sorted(lines.items(), key=lambda item: -sum(score for _, score in item[1]) / len(item[1]))
    colours = plt.get_cmap("tab20")
    for number, ((engine, label), points) in enumerate(ranking):
        peer = engine == "kvpress"
        axes.plot(
            *zip(*points, strict=True),
            linestyle="--" if peer else "-",
            marker="x" if peer else "o",
            color=colours(number % 20),
            label=f"{label} (kvpress)" if peer else label,
        )
    axes.axhline(1.0, color="black", linewidth=0.8, label="full cache")
    axes.set_xlabel("kept share: token slots held / tokens of the context")
    axes.set_ylabel("score on needle tasks / full cache's score")
    axes.set_ylim(-0.03, 1.1)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=130)
    plt.close(figure)
