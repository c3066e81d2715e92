"""Run the demo in a terminal and draw what it showed, when it showed it: `make recording`.

Writes an animated picture (SVG, no script, no font) and the run's JSON object with its seconds. A picture lasts as long
as the run did, and ten seconds more.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from kvevict_demo.terminal import Film, draw_film, film

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "docs" / "demo.svg"
FIGURES = ROOT / "docs" / "results" / "demo-watched.json"
COMMAND = [sys.executable, "-W", "ignore", str(ROOT / "examples" / "demo" / "run.py")]


def write(recorded: Film, output: str) -> None:
    """Write both files from a film and what the run printed on standard output."""
    figures = json.loads(output.splitlines()[-1]) | {"seconds": round(recorded.seconds, 1)}
    FIGURES.write_text(json.dumps(figures) + "\n", encoding="utf-8")
    PICTURE.write_text(draw_film(recorded, "make demo"), encoding="utf-8")


if __name__ == "__main__":
    write(*film([*COMMAND, *sys.argv[1:]]))
