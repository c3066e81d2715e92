"""Check and measure the kernels and the attention on a GPU; needs torch and triton. Servers: serve_gpu.py.

Run on a GPU machine, from the repository root: python benchmarks/gpu/run_all.py [--part PART] [--out FOLDER]
Without a GPU, to see that it works: python benchmarks/gpu/run_all.py --smoke --out FOLDER (tiny, interpreted)

Every section runs in a process of its own, so a failure ends only its section. The sections of a part together have
--limit seconds. The results of a section are added to the day's JSON file and Markdown page as soon as it ends. Exits
with 1 if a section failed or a kernel is wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PARTS = {
    "decode": ("correctness", "error", "bandwidth", "sharers", "planning", "graph", "ordering"),
    "compression": ("compaction", "compression"),
    "shapes": ("shapes", "extend"),
    "baselines": ("uniform",),
}
SECTIONS = tuple(section for part in PARTS.values() for section in part)


def run_section(section: str, *, is_smoke: bool) -> dict[str, Any]:
    """Measure one section in this process."""
    from gpu_bench import checks, decode, insertion, ordering, shapes
    from gpu_bench.clock import copy_bandwidth
    from gpu_bench.setting import FULL, SMOKE

    setting = SMOKE if is_smoke else FULL
    if is_smoke:
        _interpret()
    functions = {
        "correctness": checks.correctness,
        "error": decode.error,
        "bandwidth": decode.bandwidth,
        "sharers": decode.sharers,
        "planning": decode.planning,
        "graph": decode.graph,
        "compaction": insertion.compaction,
        "compression": insertion.compression,
        "ordering": ordering.poisoned_slots,
        "uniform": shapes.uniform,
        "extend": shapes.extend,
        "shapes": shapes.shapes,
    }
    result: dict[str, Any] = {"rows": functions[section](setting)}
    if section == "bandwidth":
        result["GB/s of a copy"] = copy_bandwidth(setting) / 1e9
    return result | {"setting": dataclasses.asdict(setting)}


def device_name() -> str:
    """Name of the GPU, asked in a process of its own: CUDA would take memory in this one all the time."""
    command = [sys.executable, "-c", "import torch; print(torch.cuda.get_device_name())"]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def _interpret() -> None:
    """Send CPU tensors to the Triton kernels, as tests do."""
    from kvevict_kernels import dispatch

    dispatch.TRITON_DEVICES = ("cuda", "cpu")


def measure(section: str, device: str, *, is_smoke: bool, seconds: float) -> dict[str, Any]:
    """Run one section in a process of its own; its results, or its failure."""
    from gpu_bench.versions import differences, versions

    results: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
        "device": device,
        "versions": versions(),
        "differences": differences(),
        "setting": {},
        "sections": {},
        "failures": {},
    }
    paths = [*(str(ROOT / folder) for folder in (".", "kernels", "tools")), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    if is_smoke:
        env["TRITON_INTERPRET"] = "1"
    command = [sys.executable, __file__, "--section", section]
    command += ["--smoke"] if is_smoke else []
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        try:
            output, errors = run.communicate(timeout=max(0.1, seconds))
        except subprocess.TimeoutExpired:
            run.terminate()
            return results | {"failures": {section: "out of time"}}
    if run.returncode:
        return results | {"failures": {section: errors[-2000:]}}
    measured: dict[str, Any] = json.loads(output.splitlines()[-1])
    rows = measured.pop("rows")
    print(f"{section}: {len(rows)} rows", flush=True)
    return results | measured | {"sections": {section: rows}}


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "gpu")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on a CPU, in Triton's interpreter")
    parser.add_argument("--part", choices=PARTS, help="one part, at most ten minutes; parts of a day share one page")
    parser.add_argument("--only", nargs="*", choices=SECTIONS, help="some sections only")
    parser.add_argument("--limit", type=float, default=570.0, help="seconds for all sections of a part")
    parser.add_argument("--section", choices=SECTIONS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.section:
        print(json.dumps(run_section(args.section, is_smoke=args.smoke)))
        return 0
    chosen = {args.part: PARTS[args.part]} if args.part else PARTS
    if args.only is not None:
        chosen = {"chosen": tuple(args.only)}
    device = "CPU (smoke run)" if args.smoke else device_name()
    failed = False
    for sections in chosen.values():
        failed |= run_part(sections, device, args)
    return 1 if failed else 0


def run_part(sections: tuple[str, ...], device: str, args: argparse.Namespace) -> bool:
    """Measure, write each section when it ends, and complain; True if something failed or is wrong."""
    from gpu_bench import page

    end = time.monotonic() + args.limit
    wrong: list[str] = []
    has_failed = False
    for section in sections:
        results = measure(section, device, is_smoke=args.smoke, seconds=end - time.monotonic())
        paths = page.write(results, args.out)
        wrong += [row["kernel"] for row in results["sections"].get("correctness", []) if not row["right"]]
        if not all(row["same bits on other spans"] for row in results["sections"].get("graph", [])):
            wrong.append("a captured step")
        for message in results["failures"].values():
            has_failed = True
            print(f"{section} failed:\n{message}", file=sys.stderr)
    for path in paths:
        print(path)
    if wrong:
        print(f"wrong: {', '.join(wrong)}", file=sys.stderr)
    return bool(wrong or has_failed)


if __name__ == "__main__":
    sys.exit(main())
