"""Whether what a context still predicts of itself tells how many answers it has lost.

Run: python benchmarks/quality/predict.py; reads models.csv, writes divergence.md and divergence.png beside it

`run.py --probes` has each context repeat four parts of itself, from the full cache and from the entries that stay, and
keeps the divergence between the two (mean over the positions, nats). A promise of quality would choose a budget by it.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from kvevict_quality.prediction import draw, points, prediction_table
from kvevict_quality.rows import MODEL_RESULTS, read_rows


def main() -> None:
    """Write the table and the plot."""
    found = points(read_rows(MODEL_RESULTS))
    table = prediction_table(found)
    title = "# Divergence on a context's own text, and the loss of answers"
    MODEL_RESULTS.with_name("divergence.md").write_text(f"{title}\n\n{table}", encoding="utf-8")
    draw(found, MODEL_RESULTS.with_name("divergence.png"))
    print(table)


if __name__ == "__main__":
    main()
