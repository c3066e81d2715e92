"""Draw the dial of docs/quality.md: score over bytes, a line for each number of bits.

Run: python benchmarks/quality/plot.py; reads docs/results/quality/results.csv and writes dial.png, and its points in
dial.csv, beside it.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from kvevict_quality import dial
from kvevict_quality.rows import RESULTS, read_rows

from kvevict_tools.csv_rows import write_records


def main() -> None:
    """Write both files."""
    points = dial.points(read_rows(RESULTS))
    write_records(RESULTS.with_name("dial.csv"), dial.Point, points)
    dial.draw(points, RESULTS.with_name("dial.png"))


if __name__ == "__main__":
    main()
