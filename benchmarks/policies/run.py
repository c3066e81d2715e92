"""What each policy costs: time of its steps as a share of the prefill, peak extra memory, growth with the length.

Run: python benchmarks/policies/run.py [--lengths 1024,4096,8192] [--repeats 3] [--only NAME ...] [--out docs/results]

The demo model is prefilled in this process with the served attention, in the server's chunks; then each policy's
signals are collected again from the same queries and keys, and its scoring, selection and compaction run as in the
server. Writes policies-cost.csv, .md and .png.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the memory profiler's own messages
os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as the servers

import torch
from policy_bench.measure import Cost, PolicyRun, measure
from policy_bench.prompt import DemoModel, PrefilledPrompt
from policy_bench.report import write_report

from kvevict_tools.models import ensure_model
from sgl_kvevict.policies import build_policy, list_policies

ROOT = Path(__file__).resolve().parents[2]
REUSE = (2, 3, 5, 10)


def cases() -> list[tuple[str, dict[str, Any]]]:
    """Every policy that the forward pass of a prompt serves with its signals, and ChunkKV's layer reuse."""
    names = [info.name for info in list_policies() if build_policy(info.name, {}) is not None]
    return [*((name, {}) for name in names), *(("chunkkv", {"reuse_layers": layers}) for layers in REUSE)]


def prefills(model: DemoModel, num_tokens: int, repeats: int) -> PrefilledPrompt:
    """The fastest of several prefills."""
    token_ids = model.encode(num_tokens)
    best = model.prefill(token_ids)
    for _ in range(repeats):
        prompt = model.prefill(token_ids)
        best = min(best, prompt, key=lambda one: one.seconds)
    return best


def measure_all(lengths: list[int], repeats: int, budget: float, only: list[str]) -> Iterator[Cost]:
    """All policies, or some, at all lengths."""
    model = DemoModel(ensure_model())
    for num_tokens in lengths:
        prompt = prefills(model, num_tokens, repeats - 1)
        print(f"{num_tokens} tokens: prefill {prompt.seconds:.2f} s", flush=True)
        for name, options in cases():
            if only and name not in only:
                continue
            cost = measure(PolicyRun(prompt, name, options, budget), prompt.seconds, repeats)
            print(f"  {cost.policy:<26}{100 * cost.time_share:6.1f} % {100 * cost.memory_share:6.1f} %", flush=True)
            yield cost


def main() -> None:
    """Measure and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="1024,4096,8192", help="prompt lengths (tokens)")
    parser.add_argument("--repeats", type=int, default=3, help="the fastest counts")
    parser.add_argument("--budget", type=float, default=0.2, help="share of entries kept")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results", help="folder of the report")
    parser.add_argument("--only", nargs="*", default=[], help="policies to measure; nothing is written then")
    args = parser.parse_args()
    started = time.monotonic()
    lengths = [int(length) for length in args.lengths.split(",")]
    costs = list(measure_all(lengths, args.repeats, args.budget, args.only))
    if args.only:
        return
    machine = f"{os.cpu_count()} CPU cores, {torch.get_num_threads()} threads, torch {torch.__version__}, bfloat16"
    write_report(costs, args.out, args.budget, machine)
    print(f"{time.monotonic() - started:.0f} s; wrote {args.out}/policies-cost.{{csv,md,png}}")


if __name__ == "__main__":
    main()
