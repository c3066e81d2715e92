"""Run the campaign: ``make campaign`` (ARGS="machine fuzz"). Stops at the first failure; goes on where it stopped.

What is done is kept in ``docs/results/campaign/``, one file a part, after every unit, with the commits that it was done
on: it is committed, so that hours of several machines add up. A part that is stopped in any way (also with SIGTERM)
loses the unit that ran, and begins with it again. Parts may run beside each other, each once, at low priority, to be
left in the background. ``--share 0.02`` tries every kind of unit once at a fiftieth of its size, and keeps nothing.
After every unit the table of ``docs/reliability.md`` is written anew.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from campaign import bounds, faults, fuzz, machine, orders, random_requests, soak
from campaign.parts import Part

from helpers.modes import MODES

ROOT = Path(__file__).resolve().parents[2]
STATE = ROOT / "docs" / "results" / "campaign"
LOCKS = ROOT / "out" / "campaign"
PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- campaign -->\n", "<!-- /campaign -->\n"
LOW_PRIORITY = 10
MAX_COUNTS = 2
"""Counts of a part that the page shows; of more it shows the file."""
MACHINE = "random operations with real policies, every forward checked byte for byte"
BOUNDS = "requests through tree and events in fast motion, memory flat"

PARTS = (
    Part("machine", MACHINE, 1_000_000, machine.unit, len(machine.POLICIES) + 1),
    Part(
        "fuzz", "random input at options, configuration, sockets and stored files", 120_000, fuzz.unit, len(fuzz.CASES)
    ),
    Part("bounds", BOUNDS, 1_000_000, bounds.unit, len(bounds.POLICIES)),
    Part(
        "requests",
        "random requests on real servers with a small pool",
        10_000,
        random_requests.unit,
        len(random_requests.POLICIES),
    ),
    Part("modes", "requests under every way to schedule them", 300 * len(MODES), soak.modes, len(MODES)),
    Part("faults", "faults around a server", 2 * len(faults.FAULTS), faults.unit, len(faults.FAULTS)),
    Part(
        "orders", "orders of pauses, aborts, flushes, new weights beside requests", 200, orders.unit, len(orders.TIERS)
    ),
    Part("soak", "minutes at saturation, memory flat, no error line", 60, soak.soak, 1),
    Part("lengths", "minutes of prompts of all lengths in bfloat16, memory flat", 30, soak.lengths, 1),
)


def load(name: str) -> dict[str, Any]:
    """What was done of a part until now."""
    path = STATE / f"{name}.json"
    nothing: dict[str, Any] = {"units": 0, "failures": 0, "seconds": 0.0, "counts": {"done": 0}, "commits": {}}
    return json.loads(path.read_text()) if path.exists() else nothing


def save(name: str, state: dict[str, Any]) -> None:
    """Keep what was done, all of it or nothing."""
    for folder in (STATE, LOCKS):
        folder.mkdir(parents=True, exist_ok=True)
    path = LOCKS / f"{name}.new"
    path.write_text(json.dumps(state, indent=1) + "\n")
    path.replace(STATE / f"{name}.json")
    write_table()


def write_table() -> None:
    """What was done of all parts, in the documentation."""
    LOCKS.mkdir(parents=True, exist_ok=True)
    with (LOCKS / "table.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before, _, rest = PAGE.read_text().partition(BEGIN)
        text = table({part.name: load(part.name) for part in PARTS})
        PAGE.write_text(before + BEGIN + text + END + rest.partition(END)[2])


def commit() -> str:
    """The commit that is checked out, marked if code was changed since."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    changed = git("status", "--porcelain", "--", "sgl_kvevict", "kernels", "tests", "tools")
    return git("rev-parse", "--short=7", "HEAD") + (" and changes" if changed else "")


@contextmanager
def alone(name: str) -> Iterator[None]:
    """Run a part once at a time."""
    LOCKS.mkdir(parents=True, exist_ok=True)
    with (LOCKS / f"{name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit(f"{name} runs already")
        yield


def run_part(part: Part) -> bool:
    """Do units until the target is reached; False after a failure."""
    state, on = load(part.name), commit()
    while state["counts"]["done"] < part.target:
        seed, begin = state["units"], time.monotonic()
        try:
            counts = part.unit(seed, 1.0)
        except Exception:  # whatever it is, it is this unit's failure: shown, counted, and the end of the part
            traceback.print_exc()
            print(f"{part.name}: failed with seed {seed}; the same unit runs first next time", file=sys.stderr)
            state["failures"] += 1
            save(part.name, state)
            return False
        add(state["counts"], counts)
        state["commits"][on] = state["commits"].get(on, 0) + counts["done"]
        state["units"] += 1
        state["seconds"] += time.monotonic() - begin
        save(part.name, state)
        print(f"{part.name}: seed {seed}, {progress(part, state)}", flush=True)
    return True


def add(counts: dict[str, float], more: Any) -> None:
    """Add what a unit did to what was done before."""
    for name, value in more.items():
        before = counts.get(name, 0)
        counts[name] = max(before, value) if name.startswith("largest") else before + value


def progress(part: Part, state: dict[str, Any]) -> str:
    """How far a part is, how fast, and for how long it will go on."""
    done = state["counts"]["done"]
    speed = done / state["seconds"]
    hours = max(part.target - done, 0) / speed / 3600
    return f"{done:,.0f} of {part.target:,}, {speed:.3g} per second, {hours:.1f} h to go"


def try_part(part: Part, share: float) -> bool:
    """One small unit of every kind, after which nothing is kept."""
    state: dict[str, Any] = {"seconds": 0.0, "counts": {"done": 0}}
    for seed in range(part.kinds):
        begin = time.monotonic()
        counts = part.unit(seed, share)
        state["seconds"] += time.monotonic() - begin
        add(state["counts"], counts)
        said = ", ".join(f"{name}: {value:,.4g}" for name, value in counts.items())
        print(f"{part.name}: seed {seed}, {time.monotonic() - begin:.1f} s, {said}", flush=True)
    print(f"{part.name}: {progress(part, state)}", flush=True)
    return True


def table(states: dict[str, dict[str, Any]]) -> str:
    """The figures as a table."""
    heads = ("part", "what", "done", "of", "failures", "seeds", "hours", "commits", "counted")
    lines = ["|" + "|".join(heads) + "|", "|" + "---|" * len(heads)]
    for part in PARTS:
        state = states[part.name]
        counts = [f"{name}: {value:,.0f}" for name, value in state["counts"].items() if name != "done"]
        counted = (
            ", ".join(counts) if len(counts) <= MAX_COUNTS else f"[{part.name}.json](results/campaign/{part.name}.json)"
        )
        seeds = f"0 to {state['units'] - 1}" if state["units"] else ""
        done, failures = f"{state['counts']['done']:,.0f}", str(state["failures"])
        hours, commits = f"{state['seconds'] / 3600:.1f}", ", ".join(state["commits"])
        row = (part.name, part.what, done, f"{part.target:,}", failures, seeds, hours, commits)
        lines.append("|" + "|".join((*row, counted)) + "|")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the parts named on the command line; all if there are none."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[[], *(part.name for part in PARTS)], metavar="PART")
    parser.add_argument("--share", type=float, help="try every kind of unit once at this share of its size")
    arguments = parser.parse_args()
    if arguments.share is None:
        os.nice(LOW_PRIORITY)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that servers are ended too
    for part in PARTS:
        if arguments.parts and part.name not in arguments.parts:
            continue
        if arguments.share is not None:
            try_part(part, arguments.share)
            continue
        with alone(part.name):
            if not run_part(part):
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
