"""What a request with ``complete`` costs, and what it answers, beside one with ``exact``, on a compressed prefix.

Run: python benchmarks/quality/complete.py [--model demo]; writes docs/results/quality/complete.csv and complete.md.
Rows of the model replace those that are there.

A context is prefilled alone, with the default configuration, so it is compressed at once to a fifth of its bytes. The
first request that asks about it has ``complete``: the evicted entries come back from the host's memory. Further ones
find them there. Then the same questions are asked with ``exact``, each of which computes the whole context again: their
answers are those of an uncompressed cache.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

sys.path.insert(0, str(Path(__file__).resolve().parent))

from kvevict_quality.origin import commit
from kvevict_quality.rows import ROOT
from kvevict_quality.sample import Prompts
from kvevict_quality.tasks import make_sample, select_tasks

from kvevict_tools.csv_rows import read_rows, write_rows
from kvevict_tools.launcher import RunningServer, kvevict_system, launch
from kvevict_tools.measure import flush
from kvevict_tools.models import made_model
from sgl_kvevict.client import CacheReport

RESULTS = ROOT / "docs" / "results" / "quality" / "complete.csv"
POOL_SLOTS = 12_000
COMPLETE, EXACT = "complete", "exact"

Row = dict[str, str]
Rows = Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class Answer:
    """An answer, the seconds until it was there, and what it was read from."""

    tokens: tuple[int, ...]
    seconds: float
    report: CacheReport


def ask(server: RunningServer, ids: Sequence[int], max_new_tokens: int, option: str | None = None) -> Answer:
    """Ask greedily; ``option``: of the request, which is set to true."""
    sampling: dict[str, object] = {"temperature": 0, "max_new_tokens": max_new_tokens}
    if option is not None:
        sampling["custom_params"] = {"kvevict": {option: True}}
    begin = time.perf_counter()
    reply = json.loads(server.post("/generate", {"input_ids": list(ids), "sampling_params": sampling}, 3600.0))
    seconds = time.perf_counter() - begin
    return Answer(tuple(reply["output_ids"]), seconds, CacheReport.of(reply["meta_info"]))


def measure(server: RunningServer, prompts: Prompts, args: argparse.Namespace) -> Iterator[Row]:
    """One row for each question and option; the first ones of a context have the seconds to the first token."""
    for task, index in itertools.product(select_tasks(args.tasks), range(args.contexts)):
        sample = make_sample(task, args.tokens, args.seed, index, prompts.count)
        context_ids = prompts.context_ids(sample)
        chosen = sample.questions[: args.questions]
        asked = [[*context_ids, *prompts.question_ids(sample, each)] for each in chosen]
        flush(server)
        ask(server, context_ids, 1)
        for option in (COMPLETE, EXACT):
            first = ask(server, asked[0], 1, option)
            for number, (ids, question) in enumerate(zip(asked, chosen, strict=True)):
                answer = ask(server, ids, question.max_new_tokens, option)
                yield {
                    "task": task,
                    "context": str(index),
                    "question": str(number),
                    "option": option,
                    "tokens": str(len(context_ids)),
                    "first_token_s": f"{first.seconds:.3f}" if number == 0 else "",
                    "found": str(first.report.device if number == 0 else answer.report.device),
                    "share": f"{answer.report.compressed.share:.2f}",
                    "bits": f"{answer.report.compressed.bits:.1f}",
                    "score": f"{question.score(prompts.decode(answer.tokens)):.3f}",
                    "answer": " ".join(map(str, answer.tokens)),
                }


def page(rows: Rows) -> str:
    """The page: one line for each model and task, then all tasks."""
    lines = [
        "# Complete answers from a compressed prefix",
        "",
        "Written by `python benchmarks/quality/complete.py`. A context is compressed to a fifth of its bytes. A",
        "request with `complete` loads the evicted entries from the host's memory, one with `exact` computes the",
        "context again, as an uncompressed cache would have it. *First token*: seconds of the first request of each",
        "context, medians, and the median of the ratios. *Score*: of `complete`, of `exact`, and their ratio. *Same*:",
        "answers that are equal, token by token. *Share*: of the entries, that was read with `complete`, the least.",
        "",
        "| model | task | questions | first token, complete | exact | ratio | score, complete | exact | ratio | same "
        "| share | commit |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|---|",
    ]
    for model in dict.fromkeys(row["model"] for row in rows):
        of_model = [row for row in rows if row["model"] == model]
        tasks = [*dict.fromkeys(row["task"] for row in of_model), "all"]
        lines += [_line(model, task, [row for row in of_model if task in (row["task"], "all")]) for task in tasks]
    return "\n".join(lines) + "\n"


def _line(model: str, task: str, rows: Rows) -> str:
    """A line of the page."""
    complete, exact = ([row for row in rows if row["option"] == option] for option in (COMPLETE, EXACT))
    times = [
        (float(one["first_token_s"]), float(other["first_token_s"]))
        for one, other in zip(complete, exact, strict=True)
        if one["first_token_s"]
    ]
    scores = [fmean(float(row["score"]) for row in some) for some in (complete, exact)]
    same = fmean(one["answer"] == other["answer"] for one, other in zip(complete, exact, strict=True))
    seconds = " | ".join(f"{median(column):.2f}" for column in zip(*times, strict=True))
    ratio = scores[0] / scores[1] if scores[1] else 1.0
    return (
        f"| {model} | {task} | {len(complete)} | {seconds} | {median(one / other for one, other in times):.3f} "
        f"| {scores[0]:.3f} | {scores[1]:.3f} | {ratio:.0%} | {same:.0%} "
        f"| {min(float(row['share']) for row in complete):.2f} | {rows[0]['commit']} |"
    )


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="a name of `make model ARGS=--list`")
    parser.add_argument("--tasks", nargs="*", default=["needle-single", "needle-multi-key", "table", "reading"])
    parser.add_argument("--tokens", type=int, default=2800, help="of a context")
    parser.add_argument("--contexts", type=int, default=2, help="of a task")
    parser.add_argument("--questions", type=int, default=4, help="of a context")
    parser.add_argument("--seed", type=int, default=62)
    return parser.parse_args()


def main() -> None:
    """Measure one model."""
    from transformers import AutoTokenizer

    args = parse_arguments()
    folder = Path(made_model(args.model))
    prompts = Prompts(AutoTokenizer.from_pretrained(folder))
    flags = ("--max-total-tokens", str(POOL_SLOTS), "--random-seed", "42")
    system = kvevict_system("complete", {}, flags)
    log_path = ROOT / "out" / "quality" / "complete.log"
    where = {"model": folder.name, "seed": str(args.seed), "commit": commit()}
    new: list[Row] = []
    with launch(folder, flags=system.flags, env=system.env, log_path=log_path) as server:
        for row in measure(server, prompts, args):
            new.append(where | row)
            print(" ".join(row.values())[:100], flush=True)
    rows = [*(row for row in read_rows(RESULTS) if row["model"] != folder.name), *new]
    write_rows(RESULTS, rows[0], rows)
    RESULTS.with_suffix(".md").write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
