"""Real servers on a GPU, what is worth most first; each row is printed and written the moment it is known.

    python benchmarks/gpu/serve_gpu.py [--plan ours,fa3,ours-full,triton] [--seconds 540] [--out out/gpu]

Needs SGLang: an installation, or the kit's environment (docs/gpu.md). All systems have the same shape of weights,
pool, page size and limits (``gpu_bench/systems.py``); each runs alone. The model is llama-8B's shape with random
weights, which take 16 GB in ``out/``; only times have a meaning. ``--tiny`` asks the same of tiny models; without a
GPU SGLang's CPU path serves them, to see that everything works.

| word of a plan | does |
|---|---|
| ours, ours-16, ours-full | our plugin at budget 0.2, with rows of 16 bits, at budget 1.0: all phases |
| fa3, triton, flashinfer | the same of stock SGLang with this attention |
| answers | greedy answers of ``triton``, ``ours-full`` and ``ours`` from a thin model with random weights |
| real-answers | the same from SmolLM2, if it is there (``make model``), beside ``--expected`` |
| mixed | two minutes of random traffic with aborts against ``ours`` |

Phases of one system: ``first``: seconds for an uncached document of 32k tokens; ``cached``: ms to the first token of a
question of 128 tokens on it; ``decode N``: tokens/s of N questions on it at once; ``fitting``: questions on three
documents that fit, requests/s; ``pressure``: one on each of as many documents as fill four pools, requests/s and the
share of tokens found in the cache.

Stop rules: no server is started with less than 60 s left, no decode with less than 25 s; what was skipped is a row. If
the first server of a plan does not start, nothing else is tried (exit code 3): read its log; ``--no-graphs`` starts all
systems without captured decode steps. Exit code 1: something failed, and the rows say what.
"""

from __future__ import annotations

import argparse
import os
import sys
import urllib.error
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("benchmarks/gpu", ".", "kernels", "tools", "tests")]

from gpu_bench import rows as rows_module  # noqa: E402
from gpu_bench.phases import START_SECONDS_LEFT, Phases  # noqa: E402
from gpu_bench.rows import Rows  # noqa: E402
from gpu_bench.systems import (  # noqa: E402
    ATTENTIONS,
    FULL,
    NAMES,
    OURS,
    SMALL,
    MissingError,
    random_model,
    require,
)

from kvevict_tools.launcher import LaunchError  # noqa: E402
from kvevict_tools.models import model_path  # noqa: E402

ANSWERING = ("triton", "ours-full", "ours")
"""Systems whose answers are compared with those of the first."""
WORDS = (*OURS, *ATTENTIONS, "answers", "real-answers", "mixed")


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--plan", type=plan_of, default="ours,fa3,ours-full,triton", help="words, by commas")
    parser.add_argument("--seconds", type=float, default=540.0, help="for everything")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ROOT / "out" / "gpu")))
    parser.add_argument("--expected", type=Path, help="rows.jsonl with answers of another device")
    parser.add_argument("--tiny", action="store_true", help="tiny models and few requests")
    parser.add_argument("--no-graphs", action="store_true", help="decode steps of all systems are not captured")
    parser.add_argument("--page", type=Path, nargs="+", help="only make the day's page of these rows.jsonl")
    args = parser.parse_args(arguments)
    if args.page:
        paths = rows_module.write_page(rows_module.read_rows(args.page), ROOT / "docs" / "results" / "gpu")
        print(*paths, sep="\n")
        return 0
    try:
        require(args.plan)
        device = device_name(is_tiny=args.tiny)
    except MissingError as error:
        print(f"serve_gpu: {error}", file=sys.stderr)
        return 1
    load = SMALL if args.tiny else FULL
    rows = Rows(args.out, device or "CPU", args.seconds, load.sizes())
    has_speed = not {"answers", "real-answers"}.issuperset(args.plan)  # the others have models of their own
    model = random_model(load.model, "cuda" if device else "cpu") if has_speed else Path()
    phases = Phases(rows, load, model, args.out, is_gpu=bool(device), graphs=not args.no_graphs)
    return run(args.plan, phases, args.expected)


def plan_of(text: str) -> list[str]:
    """The words of a plan.

    argparse.ArgumentTypeError: an unknown word.
    """
    words = text.split(",")
    if unknown := [word for word in words if word not in WORDS]:
        raise argparse.ArgumentTypeError(f"got {', '.join(unknown)}; allowed: {', '.join(WORDS)}")
    return words


def device_name(*, is_tiny: bool) -> str | None:
    """Name of the GPU; None without one.

    MissingError: there is none, and the sizes are not tiny.
    """
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    if not is_tiny:
        raise MissingError("torch sees no CUDA device: run on a GPU, or with --tiny to see that everything works")
    return None


def run(plan: Sequence[str], phases: Phases, expected: Path | None) -> int:
    """Do a plan's words in order; the exit code."""
    rows, failed = phases.rows, False
    for place, word in enumerate(plan):
        if not phases.has_time(NAMES.get(word, word), "all", START_SECONDS_LEFT):
            break
        try:
            do(word, phases, expected)
        except (LaunchError, OSError, RuntimeError, AssertionError, ValueError, KeyError) as error:
            failed = True
            detail = error.read().decode(errors="replace") if isinstance(error, urllib.error.HTTPError) else ""
            why = f"{type(error).__name__}: {error} {detail}".strip()
            rows.add(NAMES.get(word, word), rows_module.FAILED, why=why[-3000:])
            if place == 0 and isinstance(error, LaunchError):
                print("the first server did not start: nothing else is tried", file=sys.stderr)
                return 3
    return int(failed)


def do(word: str, phases: Phases, expected: Path | None) -> None:
    """Do one word of a plan."""
    if word == "mixed":
        phases.mix()
    elif word == "answers":
        phases.compare(ANSWERING, random_model(phases.load.thin, "cpu"))
    elif word == "real-answers":
        model = model_path()
        if model is None:
            raise MissingError("SmolLM2 is not there: `make model` makes it")
        phases.compare(ANSWERING, model, expected)
    else:
        phases.measure(word)


if __name__ == "__main__":
    sys.exit(main())
