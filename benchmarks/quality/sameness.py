"""How often the answer to one question changes while its prefix shrinks, is dropped and comes back.

Run: python benchmarks/quality/sameness.py [--models demo qwen-0.5b qwen-1.5b]; writes docs/results/quality/sameness.csv
and sameness.md. Rows of a model and a setup replace those that are there.

A pool has room for one context and a few questions. Each question is asked 30 times, greedily, alone. Between the asks
other requests, of which nothing stays cached, take as many token slots as it needs to bring the context to its next
share, out of the pool, and so on from the beginning when all slots are free again. What each answer was read from is
what the server tells its clients.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from kvevict_quality.by_model import paired_share
from kvevict_quality.origin import commit
from kvevict_quality.rows import ROOT
from kvevict_quality.sample import Prompts, Question
from kvevict_quality.tasks import make_sample, select_tasks

from kvevict_tools.csv_rows import read_rows, write_rows
from kvevict_tools.launcher import RunningServer, kvevict_system, launch
from kvevict_tools.measure import flush
from kvevict_tools.models import made_model
from sgl_kvevict.client import CacheReport, warm
from sgl_kvevict.config import KVEvictConfig

RESULTS = ROOT / "docs" / "results" / "quality" / "sameness.csv"
ASKS = 30
"""Of each question."""
ROOM = 256
"""Token slots of the pool beside a context: for its questions, and one answer."""
SLACK = 8
"""Token slots that a request cannot have, beside those of its prompt and first token (SGLang's admission)."""
AMPLE, RETURNED = "ample slots", "returned"
TIMES = BEFORE, DURING, AFTER = "before", "during", "after"
OPEN_QUESTION = Question("What is this text about? Answer in one sentence.", "", ("",), 24)
UNCACHED = "2.2.2.2"
"""As ``bootstrap_host``: SGLang keeps nothing of a request in its cache."""


@dataclass(frozen=True)
class Setup:
    """One server.

    Attributes:
        config: of the plugin.
        is_warm: the context is compressed before it is asked about.
    """

    config: Mapping[str, Any]
    is_warm: bool = False


SETUPS = {
    "default": Setup({}),
    "warmed before": Setup({}, is_warm=True),
    "without host memory": Setup({"host_bytes": 0}),
    "rows of 16 bits": Setup({"bits": 16}),
}


@dataclass(frozen=True)
class Stage:
    """What is done before some of the asks.

    Attributes:
        name: "ample slots", the share of its bytes to which the context shrinks, or "returned": it was dropped.
        filler_tokens: length of the request that takes slots; 0: none.
    """

    name: str
    filler_tokens: int


def stages(config: KVEvictConfig, num_tokens: int, beside: int, pool_slots: int) -> list[Stage]:
    """From ample slots down all shares that a context of ``num_tokens`` takes, and out of the pool.

    ``beside`` token slots hold its questions and their answers, which are cached too.
    With memory of the host what would shrink below the budget is dropped, and comes back from there.
    """
    shares = [share for share in config.shares if config.host_bytes == 0 or share >= config.budget]
    held = [num_tokens, *(config.num_slots(num_tokens, share=share) for share in shares)]
    found = [Stage(AMPLE, 0)]
    for share, (before, after) in zip(shares, itertools.pairwise(held), strict=True):
        left = (before + after) // 2 + beside
        found.append(Stage(f"{share:g}", max(pool_slots - left, 0)))
    return [*found, Stage(RETURNED, pool_slots - SLACK)]


def schedule(found: Sequence[Stage], num_asks: int) -> list[Stage]:
    """The stage of each ask: twice through all stages, a few asks in each, then from the beginning again."""
    in_each = max(num_asks // (2 * len(found)), 1)
    return list(itertools.islice(itertools.cycle([stage for stage in found for _ in range(in_each)]), num_asks))


class Asker:
    """Asks about one context on one server."""

    def __init__(self, server: RunningServer, context_ids: list[int], vocabulary: Sequence[int], seed: int) -> None:
        self._server = server
        self._context_ids = context_ids
        self._vocabulary = vocabulary
        self._rng = random.Random(seed)

    def ask(self, ids: Sequence[int], max_new_tokens: int, **fields: Any) -> tuple[tuple[int, ...], CacheReport]:
        """Tokens of a greedy answer, and what it was read from."""
        sampling = {"temperature": 0, "max_new_tokens": max_new_tokens}
        body = {"input_ids": list(ids), "sampling_params": sampling, **fields}
        reply = json.loads(self._server.post("/generate", body, 3600.0))
        return tuple(reply["output_ids"]), CacheReport.of(reply["meta_info"])

    def prepare(self, *, is_warm: bool) -> None:
        """Put the context into an empty cache."""
        flush(self._server)
        if is_warm:
            warm(self._server.url, input_ids=self._context_ids, timeout=3600.0)
        else:
            self.ask(self._context_ids, 1)

    def fill(self, num_tokens: int) -> None:
        """Take so many token slots for a while."""
        if num_tokens:
            first = next(token for token in self._vocabulary if token != self._context_ids[0])
            self.ask([first, *self._rng.choices(self._vocabulary, k=num_tokens - 1)], 1, bootstrap_host=UNCACHED)

    def asks(
        self, questions: Sequence[tuple[list[int], int]], found: Sequence[Stage]
    ) -> Iterator[tuple[int, int, Stage, tuple[int, ...], CacheReport]]:
        """Ask all questions (ids and length of the answer) once for each entry of ``found``.

        Yields number of the question, of the ask, its stage, the answer, and what it was read from.
        """
        for number, (stage, before) in enumerate(zip(found, [None, *found], strict=False)):
            if stage is not before:
                self.fill(stage.filler_tokens)
            for question, (ids, max_new_tokens) in enumerate(questions):
                answer, report = self.ask([*self._context_ids, *ids], max_new_tokens)
                yield question, number, stage, answer, report


Row = dict[str, str]
Rows = Sequence[Mapping[str, str]]


def measure(server: RunningServer, prompts: Prompts, args: argparse.Namespace, setup: Setup) -> Iterator[Row]:
    """One row for each ask of a setup: the answer's number among those of its question, and what it was read from."""
    config = KVEvictConfig.model_validate(dict(setup.config))
    vocabulary = prompts.encode(" ".join(map(str, range(1000, 1400))))
    for task, index in itertools.product(select_tasks(args.tasks), range(args.contexts)):
        sample = make_sample(task, args.tokens, args.seed, index, prompts.count)
        context_ids = prompts.context_ids(sample)
        chosen = *sample.questions[: args.questions], OPEN_QUESTION
        questions = [(prompts.question_ids(sample, each), each.max_new_tokens) for each in chosen]
        asker = Asker(server, context_ids, vocabulary, args.seed)
        asker.prepare(is_warm=setup.is_warm)
        beside = sum(len(ids) + max_new_tokens for ids, max_new_tokens in questions)
        found = stages(config, len(context_ids), beside, args.tokens + ROOM)
        seen: list[list[tuple[int, ...]]] = [[] for _ in questions]
        for question, number, stage, answer, report in asker.asks(questions, schedule(found, args.asks)):
            if answer not in seen[question]:
                seen[question].append(answer)
            read = report.compressed
            yield {
                "task": task,
                "context": str(index),
                "question": str(question),
                "ask": str(number),
                "stage": stage.name,
                "answer": str(seen[question].index(answer)),
                "score": _score(chosen[question], prompts.decode(answer)),
                "device": str(report.device),
                "host": str(report.host),
                "compressed": str(read.num_tokens),
                "share": f"{read.share:.2f}",
                "bits": f"{read.bits:.1f}",
            }


def _score(question: Question, answer: str) -> str:
    """A share of 1; empty: the question has no right answer."""
    return "" if question is OPEN_QUESTION else f"{question.score(answer):.3f}"


def of_questions(rows: Rows) -> list[list[int]]:
    """The answers' numbers of each question, in the order of the asks."""
    found: dict[tuple[str, ...], list[int]] = {}
    for row in rows:
        key = tuple(row[name] for name in ("model", "setup", "task", "context", "question"))
        found.setdefault(key, []).append(int(row["answer"]))
    return list(found.values())


def changes(answers: Sequence[int]) -> int:
    """How often an answer is another one than that before it."""
    return sum(before != after for before, after in itertools.pairwise(answers))


def by_time(rows: Rows) -> dict[str, list[float]]:
    """Mean scores of each question before its prefix moves for the first time, while it moves, and once it is back."""
    found: dict[tuple[str, ...], dict[str, list[float]]] = {}
    for row in rows:
        if row["score"]:
            key = tuple(row[name] for name in ("model", "setup", "task", "context", "question"))
            of_question = found.setdefault(key, {name: [] for name in TIMES})
            rest = AFTER if of_question[DURING] else BEFORE
            of_question[rest if row["stage"] == AMPLE else DURING].append(float(row["score"]))
    whole = [each for each in found.values() if all(each.values())]
    return {name: [fmean(each[name]) for each in whole] for name in TIMES}


def page(rows: Rows) -> str:
    """The page: by model and setup, then by when it was asked, and by what an answer was read from."""
    lines = [
        "# Sameness of answers",
        "",
        "Written by `python benchmarks/quality/sameness.py`. A question is asked many times (*asks*), greedily, while",
        "its prefix shrinks to the budget, leaves the pool and comes back, again and again. Other requests take and",
        "give back the slots. *Same*: answers that equal the first one, token by token. *Distinct*: different",
        "answers to a question, mean and most. *Changes*: answers that differ from the one before.",
        "",
        "| model | setup | questions | asks | same | distinct | changes | commit |",
        "|---|---|--:|--:|--:|--:|--:|---|",
    ]
    for (model, setup), chosen in _groups(rows, "model", "setup"):
        answers = of_questions(chosen)
        same = fmean(answer == 0 for each in answers for answer in each)
        distinct = [len(set(each)) for each in answers]
        lines.append(
            f"| {model} | {setup} | {len(answers)} | {len(answers[0])} | {same:.0%} "
            f"| {fmean(distinct):.1f}, {max(distinct)} | {fmean(map(changes, answers)):.1f} | {chosen[0]['commit']} |"
        )
    lines += [
        "",
        "## Scores before, during and after",
        "",
        "Of the questions that have right answers: *before* the prefix moves for the first time, *during* all stages",
        "with less than ample slots, *after* the slots are free again. In brackets, the share of before, with the",
        "standard error of paired questions.",
        "",
        "| model | setup | questions | before | during | after |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for (model, setup), chosen in _groups(rows, "model", "setup"):
        scores = by_time(chosen)
        before = scores[BEFORE]
        if not before or not any(before):
            continue
        cells = [f"{fmean(before):.3f}"]
        for name in (DURING, AFTER):
            share, error = paired_share(before, scores[name])
            cells.append(f"{fmean(scores[name]):.3f} ({share:.0%} ± {error:.0%})")
        lines.append(f"| {model} | {setup} | {len(before)} | {' | '.join(cells)} |")
    lines += [
        "",
        "## By stage",
        "",
        "What answers of a stage were read from, means: compressed tokens of the prompt, share of their entries, bits",
        "of a number.",
        "",
        "| model | setup | stage | same | compressed | share | bits |",
        "|---|---|---|--:|--:|--:|--:|",
    ]
    for (model, setup, stage), chosen in _groups(rows, "model", "setup", "stage"):
        is_first = fmean(row["answer"] == "0" for row in chosen)
        read = (fmean(float(row[name]) for row in chosen) for name in ("compressed", "share", "bits"))
        read_from = "{:.0f} | {:.2f} | {:.1f}".format(*read)
        lines.append(f"| {model} | {setup} | {stage} | {is_first:.0%} | {read_from} |")
    return "\n".join(lines) + "\n"


def _groups(rows: Rows, *names: str) -> list[tuple[tuple[str, ...], list[Mapping[str, str]]]]:
    """Rows with the same values of some columns, in the order in which they first come."""
    found: dict[tuple[str, ...], list[Mapping[str, str]]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in names), []).append(row)
    return list(found.items())


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=["demo"], help="names of `make model ARGS=--list`")
    parser.add_argument("--setups", nargs="*", default=list(SETUPS), choices=list(SETUPS))
    parser.add_argument("--tasks", nargs="*", default=["table", "needle-multi-key", "squad"])
    parser.add_argument("--tokens", type=int, default=1024, help="of a context")
    parser.add_argument("--contexts", type=int, default=1, help="of a task")
    parser.add_argument("--questions", type=int, default=2, help="of a context, beside an open one")
    parser.add_argument("--asks", type=int, default=ASKS)
    parser.add_argument("--seed", type=int, default=62)
    return parser.parse_args()


def main() -> None:
    """Measure, and write after each setup."""
    from transformers import AutoTokenizer

    args, started = parse_arguments(), time.monotonic()
    for model, name in itertools.product(args.models, args.setups):
        folder, setup = Path(made_model(model)), SETUPS[name]
        prompts = Prompts(AutoTokenizer.from_pretrained(folder))
        flags = ("--max-total-tokens", str(args.tokens + ROOM), "--random-seed", "42")
        system = kvevict_system("sameness", setup.config, flags)
        log_path = ROOT / "out" / "quality" / "sameness.log"
        where = {"model": folder.name, "setup": name, "seed": str(args.seed), "commit": commit()}
        with launch(folder, flags=system.flags, env=system.env, log_path=log_path) as server:
            new = [where | row for row in measure(server, prompts, args, setup)]
        others = [row for row in read_rows(RESULTS) if (row["model"], row["setup"]) != (folder.name, name)]
        rows = [*others, *new]
        write_rows(RESULTS, rows[0], rows)
        RESULTS.with_suffix(".md").write_text(page(rows), encoding="utf-8")
        print(f"{time.monotonic() - started:6.0f} s  {folder.name}, {name}: {len(new)} asks", flush=True)


if __name__ == "__main__":
    main()
