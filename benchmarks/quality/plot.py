"""Draw score over kept share, all policies and peers in one plot, and write the tables of docs/quality.md.

Run: python benchmarks/quality/plot.py [--results FILE]; writes curves.png and tables.md beside the results. Then draws
the dial, score over bytes with a line for each number of bits, from few-bits.csv: dial.png, and its points in dial.csv.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from kvevict_quality import dial
from kvevict_quality.by_model import fidelity_table, model_table
from kvevict_quality.curves import draw
from kvevict_quality.rows import AWARE_RESULTS, BITS_RESULTS, MODEL_RESULTS, RESULTS, read_rows
from kvevict_quality.tables import aware_table, by_length, full_table, plain_table, policy_table

from kvevict_tools.csv_rows import write_records


def main() -> None:
    """Write all files and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--tokens", type=int, default=1024, help="length of the contexts in the plot")
    args = parser.parse_args()
    rows, models = read_rows(args.results), read_rows(MODEL_RESULTS)
    lengths = by_length(rows)
    drawn = lengths[args.tokens]
    aware = by_length(read_rows(args.results.with_name(AWARE_RESULTS.name)))
    sections = (
        ("Full cache", full_table(rows)),
        ("By model, shares of the full cache's score", model_table(models)),
        ("By model, real text", fidelity_table(models)),
        *((f"Question in the prompt, and not, {n} tokens", aware_table(lengths[n], rows)) for n, rows in aware.items()),
        *((f"Question in the prompt, by task, {n} tokens", policy_table(rows)) for n, rows in aware.items()),
        *((f"Policies and peers at {tokens} tokens", policy_table(group)) for tokens, group in lengths.items()),
        (f"Kept share, quality, memory, speed at {args.tokens} tokens", plain_table(drawn)),
    )
    text = "\n".join(f"## {title}\n\n{table}" for title, table in sections)
    (args.results.parent / "tables.md").write_text(text, encoding="utf-8")
    draw(drawn, args.results.parent / "curves.png")
    points = dial.points(read_rows(BITS_RESULTS))
    write_records(BITS_RESULTS.with_name("dial.csv"), dial.Point, points)
    dial.draw(points, BITS_RESULTS.with_name("dial.png"))
    print(text)


if __name__ == "__main__":
    main()
