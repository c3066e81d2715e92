"""Measure what answers are worth after compression, against real servers; adds to docs/results/quality/results.csv.

Run: python benchmarks/quality/run.py --policies random snapkv distilled --budgets 0.2 0.1 --tasks needles

Every context is sent alone and compressed before its questions are asked; with --aware, each question comes in one
prompt with the context, which is compressed before the answer (rows go to aware.csv). The full cache (this plugin's
attention, nothing compressed) is always measured beside what is asked for, and so is the policy `random` but with
--no-control. Rows that exist are not measured again.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from kvevict_quality.rows import AWARE_RESULTS, RESULTS, ROOT
from kvevict_quality.running import Plan, run_setup
from kvevict_quality.sample import Prompts
from kvevict_quality.systems import FULL, WHILE_PREFILLED, Setup, parse_policy
from kvevict_quality.tasks import FIDELITY_TASKS, GROUPS, select_tasks

from kvevict_tools.models import DEMO, made_model

CONTROL = "random"


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    named = f"name, name:option=value,..., or {WHILE_PREFILLED}:pool=SLOTS"
    parser.add_argument("--policies", nargs="*", default=[], help=named)
    parser.add_argument("--budgets", nargs="*", type=float, default=[0.2, 0.1], help="shares in (0, 1)")
    parser.add_argument("--tasks", nargs="*", default=["all"], help=f"names, {', '.join((*GROUPS, *FIDELITY_TASKS))}")
    parser.add_argument("--lengths", nargs="*", type=int, default=[1024], help="tokens of a context")
    parser.add_argument("--questions", type=int, default=100, help="at least so many per task")
    parser.add_argument("--contexts", type=int, help="so many per task instead")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default=DEMO, help="folder, or a name of `make model ARGS=--list`")
    parser.add_argument("--aware", action="store_true", help="context and question in one prompt")
    parser.add_argument("--no-control", action="store_true", help=f"do not measure the policy {CONTROL!r}")
    parser.add_argument("--results", type=Path, help="CSV file; default: results.csv, or aware.csv, of the documents")
    return parser.parse_args()


def main() -> None:
    """Measure what is missing."""
    from transformers import AutoTokenizer

    args = parse_arguments()
    started = time.monotonic()

    def progress(text: str) -> None:
        print(f"{time.monotonic() - started:6.0f} s  {text}", flush=True)

    model = Path(made_model(args.model))
    plan = Plan(
        model=model,
        prompts=Prompts(AutoTokenizer.from_pretrained(model)),
        tasks=select_tasks(args.tasks),
        lengths=args.lengths,
        num_questions=args.questions,
        num_contexts=args.contexts,
        seed=args.seed,
        results=args.results or (AWARE_RESULTS if args.aware else RESULTS),
        work=ROOT / "out" / "quality",
    )
    policies = _policies(args.policies if args.no_control else [*args.policies, CONTROL])
    setups = [Setup(name, budget, options, args.aware) for budget in args.budgets for name, options in policies]
    if args.aware and (found := {*FIDELITY_TASKS} & {*plan.tasks}):
        raise SystemExit(f"task {min(found)!r} has no question; leave it out with --aware")
    for setup in (Setup(FULL, 1.0, aware=args.aware), *setups):
        run_setup(plan, setup, progress)


def _policies(texts: list[str]) -> list[tuple[str, dict[str, object]]]:
    """Names and options, each once."""
    return [parse_policy(text) for text in dict.fromkeys(texts)]


if __name__ == "__main__":
    main()
