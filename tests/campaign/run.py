"""Run the campaign: ``make campaign`` (ARGS="machine fuzz"). Stops at the first failure; goes on where it stopped.

What is done is kept in ``out/campaign.json`` after every unit. When a part has reached its target, the table of
``docs/reliability.md`` is written anew.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from campaign import bounds, fuzz, machine, served
from campaign.parts import Part

ROOT = Path(__file__).resolve().parents[2]
STATE = ROOT / "out" / "campaign.json"
PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- campaign -->\n", "<!-- /campaign -->\n"

PARTS = (
    Part(
        "machine", "random operations with real policies, every forward checked byte for byte", 1_000_000, machine.unit
    ),
    Part("fuzz", "random input at options, configuration and sockets", 100_000, fuzz.unit),
    Part("bounds", "requests through tree, scoring and events in fast motion, memory flat", 1_000_000, bounds.unit),
    Part("requests", "random requests on real servers with a small pool", 10_000, served.requests),
    Part("modes", "requests under every way to schedule them", 4_200, served.modes),
    Part("faults", "faults around a server", 10, served.faults),
    Part("soak", "minutes at saturation, memory flat, no error line", 60, served.soak),
)


def load() -> dict[str, Any]:
    """What was done until now, by part."""
    state: dict[str, Any] = json.loads(STATE.read_text()) if STATE.exists() else {}
    return state


def run_part(part: Part, state: dict[str, Any]) -> bool:
    """Do units until the target is reached; False after a failure."""
    done = state.setdefault(part.name, {"units": 0, "seconds": 0.0, "counts": {"done": 0}})
    while done["counts"]["done"] < part.target:
        seed, begin = done["units"], time.monotonic()
        try:
            counts = part.unit(seed, 1.0)
        except Exception:
            traceback.print_exc()
            print(f"{part.name}: failed with seed {seed}; the same unit runs first next time", file=sys.stderr)
            return False
        for name, value in counts.items():
            largest = name.startswith(("largest", "MB"))
            before = done["counts"].get(name, 0)
            done["counts"][name] = max(before, value) if largest else before + value
        done["units"] += 1
        done["seconds"] += time.monotonic() - begin
        STATE.parent.mkdir(exist_ok=True)
        STATE.write_text(json.dumps(state, indent=1))
        print(f"{part.name}: seed {seed}, {done['counts']['done']:,.0f} of {part.target:,}", flush=True)
    return True


def table(state: dict[str, Any]) -> str:
    """The figures as a table."""
    lines = ["| part | what | done | of | failures | seeds | counted |", "|---|---|---|---|---|---|---|"]
    for part in PARTS:
        done = state.get(part.name, {"units": 0, "counts": {"done": 0}})
        counted = ", ".join(f"{name}: {value:,.0f}" for name, value in done["counts"].items() if name != "done")
        seeds = f"0 to {done['units'] - 1}" if done["units"] else ""
        row = (part.name, part.what, f"{done['counts']['done']:,.0f}", f"{part.target:,}", "0", seeds, counted)
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the parts named on the command line; all if there are none."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[[], *(part.name for part in PARTS)], metavar="PART")
    wanted = parser.parse_args().parts
    state = load()
    for part in PARTS:
        if wanted and part.name not in wanted:
            continue
        if not run_part(part, state):
            return 1
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(before + BEGIN + table(state) + END + rest.partition(END)[2])
    return 0


if __name__ == "__main__":
    sys.exit(main())
