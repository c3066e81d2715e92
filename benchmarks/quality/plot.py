"""Draw score over kept share, all policies and peers in one plot, and write the tables of docs/quality.md.

Run: python benchmarks/quality/plot.py [--results FILE]; writes curves.png and tables.md beside the results.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from kvevict_quality.by_model import fidelity_table, model_table
from kvevict_quality.curves import draw
from kvevict_quality.rows import AWARE_RESULTS, MODEL_RESULTS, RESULTS, read_rows
from kvevict_quality.tables import aware_table, by_length, full_table, plain_table, policy_table


def main() -> None:
    """Write both files and print the plain table."""
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
    print(text)


if __name__ == "__main__":
    main()
