"""Test what the papers claim of their methods on the demo model; adds to docs/results/papers/results.csv.

Run: python benchmarks/papers/run.py [--papers ada-kv chunkkv d2o k-vec] [--texts 12] [--tokens 1024]

Two kinds of texts: prompts of prose with facts that end with a question, and pieces of running prose (half as long, as
many as there are). Needs no server: the demo model is prefilled in this process with the served attention, and policies
decide with the sizes that a server would use. Numbers that exist are not measured again. Ada-KV's latencies come first;
nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as the servers
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "quality"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "policies"))

import torch
from kvevict_quality.sample import Prompts
from paper_bench import ada_kv, latency, nll, overlap
from paper_bench.results import Results
from paper_bench.texts import question_at_the_end, running_texts
from policy_bench.prompt import DemoModel

from kvevict_tools.models import ensure_model

PAPERS = ("ada-kv", "chunkkv", "d2o", "k-vec")
ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results" / "papers" / "results.csv"


def main() -> None:
    """Measure what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--papers", nargs="*", default=list(PAPERS), choices=PAPERS)
    parser.add_argument("--texts", type=int, default=12, help="of each kind")
    parser.add_argument("--tokens", type=int, default=1024, help="of a prompt")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    started = time.monotonic()
    demo, results = DemoModel(ensure_model()), Results(args.results)
    prompts = Prompts(demo.tokenizer)
    if "ada-kv" in args.papers:
        latency.measure(demo, prompts, results)
    running = running_texts(prompts, args.tokens // 2)
    asked = [question_at_the_end(prompts, args.tokens, index) for index in range(args.texts)]
    ablated = [paper for paper in args.papers if paper in nll.PAPERS]
    for count in range(1, args.texts + 1):  # text by text, so that a stopped run has all cases of the first ones
        if "ada-kv" in args.papers:
            ada_kv.measure(demo, asked[:count], results)
        overlap.measure(demo, asked[:count], results, args.papers)
        nll.measure(demo, asked[:count], results, ablated, "answer")
        nll.measure(demo, running[:count], results, ablated, "running text")
        print(f"{time.monotonic() - started:6.0f} s  text {count} of {args.texts}", flush=True)


if __name__ == "__main__":
    main()
