"""What PyPI's ``cache-pressure`` says of stock SGLang and of the default configuration, on a pool of 4,000 token slots.

The tool sends 30 contexts of 500 tokens, 3.75 times the pool, one after the other, then asks for each again, the
newest first, and counts those whose first token comes sooner than half-way between a cold and a warm one; it stops at
the first that does not. It runs in an environment of its own, and knows nothing of this package.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from serving_bench.fleet import COMMON_FLAGS, DEFAULT
from serving_bench.options import LOGS, parse_options
from serving_bench.results import ROOT, origin

from kvevict_tools.launcher import kvevict_system, launch_all, stock_system

TOOL = ROOT / ".venv-cache-pressure" / "bin" / "cache-pressure"
POOL_SLOTS = 4000
CONTEXTS = 30
ARGUMENTS = ("--kv-size", str(POOL_SLOTS), "--context-tokens", "500", "--num-contexts", str(CONTEXTS))
GOAL = 25
"""Contexts of ours that the tool must find."""


def main() -> None:
    """Run the tool on both servers, one after the other, and write the page."""
    options = parse_options(__doc__ or "", repeats=1)
    flags = ("--max-total-tokens", str(POOL_SLOTS), *COMMON_FLAGS)
    model = options.model
    outputs, retained = {}, {}
    for system in (stock_system("stock", flags), kvevict_system(DEFAULT, {}, flags)):
        with launch_all(model, [system], log_folder=LOGS / "cache-pressure") as fleet:
            result = LOGS / "cache-pressure" / f"{system.name}.json"
            command = [str(TOOL), "--base-url", f"{fleet[system.name].url}/v1", *ARGUMENTS, "--output", str(result)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
        outputs[system.name] = done.stdout.replace(str(result), result.name).replace(str(model), model.name)
        retained[system.name] = int(json.loads(result.read_text(encoding="utf-8"))["retained"])
        print(done.stdout, file=sys.stderr)
    write_page(options.out, outputs, retained, origin(options.text))
    if retained[DEFAULT] < GOAL:
        raise SystemExit(f"{retained[DEFAULT]} of {CONTEXTS} contexts retained; at least {GOAL} are wanted")


def write_page(folder: Path, outputs: dict[str, str], retained: dict[str, int], made: dict[str, str]) -> None:
    """Write ``cache-pressure.md`` with what the tool printed of each server."""
    counts = ", ".join(f"{name} {count} of {CONTEXTS}" for name, count in retained.items())
    parts = [
        "# cache-pressure",
        f"Contexts that PyPI's `cache-pressure` (requirements/cache-pressure.txt) finds again: {counts}.\n\n"
        f"`make bench-cache-pressure` runs `cache-pressure {' '.join(ARGUMENTS)}` on servers of the demo model whose "
        f"pool has {POOL_SLOTS:,} token slots. It stops at the first context whose first token is late.",
        *(f"## {name}\n\n```\n{output.strip()}\n```" for name, output in outputs.items()),
        "## Origin\n\n" + ", ".join(f"{name}: {value}" for name, value in made.items()),
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cache-pressure.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
