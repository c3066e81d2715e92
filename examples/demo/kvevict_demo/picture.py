"""The picture: which tokens each (layer, KV head) kept."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def draw_kept(kept: Mapping[str, Any], num_layers: int, title: str, path: Path) -> Path:
    """Draw a heat map: one row for each (layer, KV head), token positions from left to right.

    Args:
        kept: ``start`` and ``end`` (logical positions of the span), ``num_bins``, and ``share``: for each
            (layer, head), layer-major, the share of tokens kept in each of the bins, in [0, 1].
        num_layers: layers of the model; the number of heads follows from the number of rows.
        title: heading of the picture.
        path: PNG file to write; its folder is created.

    Returns:
        ``path``.

    Raises:
        ValueError: the rows do not fit the layers, or a row has not ``num_bins`` values.
    """
    rows = kept["share"]
    if not rows or len(rows) % num_layers:
        raise ValueError(f"kept map: {len(rows)} rows, expected a positive multiple of {num_layers} layers")
    lengths = {len(row) for row in rows}
    if lengths != {kept["num_bins"]}:
        raise ValueError(f"kept map: rows of {sorted(lengths)} bins, expected {kept['num_bins']}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure = _heat_map(kept, num_layers, title)
    figure.savefig(path, dpi=120)
    return path


def _heat_map(kept: Mapping[str, Any], num_layers: int, title: str) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows, start, end = kept["share"], kept["start"], kept["end"]
    heads = len(rows) // num_layers
    figure = Figure(figsize=(11, 8), layout="constrained")
    FigureCanvasAgg(figure)
    top, main = figure.subplots(2, 1, sharex=True, height_ratios=[1, 6])
    means = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
    width = (end - start) / len(means)
    centers = [start + (i + 0.5) * width for i in range(len(means))]
    top.bar(centers, means, width=width, color="#35618f")
    top.set_ylabel("mean share")
    top.set_title(title)
    image = main.imshow(
        rows,
        aspect="auto",
        interpolation="nearest",
        cmap="viridis",
        vmin=0.0,
        vmax=1.0,
        extent=(start, end, len(rows), 0),
    )
    main.set_xlabel("token position")
    main.set_ylabel(f"layer ({heads} KV heads each)")
    ticks = range(0, num_layers, max(1, num_layers // 10))
    main.set_yticks([layer * heads for layer in ticks], [str(layer) for layer in ticks])
    figure.colorbar(image, ax=main, label="share of tokens kept", pad=0.01)
    return figure
