"""Check and measure the GPU path on a machine that has torch and triton, and nothing else of what we need.

Run on a GPU machine, from the repository root: python benchmarks/gpu/run_all.py [--part PART] [--out FOLDER]
Without a GPU, to see that it works: python benchmarks/gpu/run_all.py --smoke --out FOLDER (tiny, interpreted)

Every section runs in a process of its own, so that one that fails takes no other along; those of a part together have
--limit seconds. A part adds to what the day's other parts have written: one JSON file and one Markdown page. Exits with
1 if a section failed or a kernel is wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.metadata
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
    "compression": ("first", "compaction", "compression"),
    "shapes": ("shapes", "extend"),
    "baselines": ("uniform", "flashinfer"),
    "serve": ("serve",),
}
SECTIONS = tuple(section for part in PARTS.values() for section in part)


def run_section(section: str, *, is_smoke: bool) -> dict[str, Any]:
    """Measure one section in this process."""
    import torch
    from gpu_bench import checks, decode, first, flashinfer, insertion, ordering, serve, shapes
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
        "flashinfer": flashinfer.side_by_side,
        "ordering": ordering.poisoned_slots,
        "uniform": shapes.uniform,
        "extend": shapes.extend,
        "shapes": shapes.shapes,
        "first": first.first_times,
        "serve": serve.end_to_end,
    }
    result: dict[str, Any] = {"rows": functions[section](setting)}
    if section == "bandwidth":
        result["GB/s of a copy"] = copy_bandwidth(setting) / 1e9
    name = torch.cuda.get_device_name() if setting.device == "cuda" else "CPU (smoke run)"
    return result | {"device": name, "setting": dataclasses.asdict(setting)}


def _interpret() -> None:
    """Send CPU tensors to the Triton kernels, as tests do."""
    from kvevict_kernels import dispatch

    dispatch.TRITON_DEVICES = ("cuda", "cpu")


def versions() -> dict[str, str]:
    """Versions of what computes."""
    found = {"python": sys.version.split()[0]}
    for package in ("torch", "triton", "flashinfer-python"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def run_all(sections: list[str], *, is_smoke: bool, limit: float) -> dict[str, Any]:
    """Run sections one after the other, each in a process; results and failures."""
    results: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
        "device": "unknown",
        "versions": versions(),
        "setting": {},
        "sections": {},
        "failures": {},
    }
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    if is_smoke:
        env["TRITON_INTERPRET"] = "1"
    end = time.monotonic() + limit
    for section in sections:
        command = [sys.executable, __file__, "--section", section, *(["--smoke"] if is_smoke else [])]
        try:
            run = subprocess.run(
                command, env=env, capture_output=True, text=True, timeout=max(0.1, end - time.monotonic()), check=False
            )
        except subprocess.TimeoutExpired:
            results["failures"][section] = "out of time"
            continue
        if run.returncode:
            results["failures"][section] = run.stderr[-2000:]
            continue
        measured = json.loads(run.stdout.splitlines()[-1])
        results["sections"][section] = measured.pop("rows")
        results |= measured
        print(f"{section}: {len(results['sections'][section])} rows", flush=True)
    return results


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
    failed = False
    for sections in chosen.values():
        failed |= run_part(list(sections), args)
    return 1 if failed else 0


def run_part(sections: list[str], args: argparse.Namespace) -> bool:
    """Measure, write and complain; True if something failed or is wrong."""
    from gpu_bench import page

    results = run_all(sections, is_smoke=args.smoke, limit=args.limit)
    for path in page.write(results, args.out):
        print(path)
    wrong = [row["kernel"] for row in results["sections"].get("correctness", []) if not row["right"]]
    if not all(row["same bits on other spans"] for row in results["sections"].get("graph", [])):
        wrong.append("a captured step")
    for section, message in results["failures"].items():
        print(f"{section} failed:\n{message}", file=sys.stderr)
    if wrong:
        print(f"wrong: {', '.join(wrong)}", file=sys.stderr)
    return bool(wrong or results["failures"])


if __name__ == "__main__":
    sys.exit(main())
