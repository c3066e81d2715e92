"""The picture: documents that the pool holds, and requests a second when they are more than it holds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from .rounds import Samples, Spread
from .systems import BASELINES, NOTHING_COMPRESSED, OURS, STOCK

_COLORS = {STOCK: "#b0b0b0", NOTHING_COMPRESSED: "#8fa8c0", OURS: "#35618f"}


def draw_comparison(fitting: Mapping[str, int], requests_per_s: Samples, title: str, path: Path) -> Path:
    """Draw the baselines beside ours.

    Args:
        fitting: documents that fit the pool, by system.
        requests_per_s: rounds, by system; drawn as median with lowest and highest.
        title: heading of the picture.
        path: PNG file to write; its folder is created.

    Returns:
        ``path``.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    left, right = figure.subplots(1, 2)
    names = (*BASELINES, OURS)
    colors = [_COLORS[name] for name in names]
    left.set_title("documents that fit the pool")
    left.bar_label(left.bar(names, [fitting[name] for name in names], color=colors))
    spreads = [Spread.of(requests_per_s[name]) for name in names]
    right.set_title("requests/s, documents of 4 times the pool")
    errors = [[s.median - s.low for s in spreads], [s.high - s.median for s in spreads]]
    bars = right.bar(names, [s.median for s in spreads], color=colors, yerr=errors, capsize=6)
    right.bar_label(bars, [f"{s.median:.2f}" for s in spreads], label_type="center")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(y=0.15)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path
