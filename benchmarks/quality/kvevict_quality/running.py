"""Measure one setup: start its server, run the tasks, one row each."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from statistics import fmean

from kvevict_quality import fidelity
from kvevict_quality.asking import Prepared, ask_all, ask_aware, prepare
from kvevict_quality.origin import commit
from kvevict_quality.rows import Row, merge_rows, read_rows
from kvevict_quality.sample import Prompts, Question
from kvevict_quality.systems import FULL, Setup
from kvevict_quality.tasks import FIDELITY_TASKS, make_sample
from kvevict_quality.tasks.texts import ShortAnswer
from kvevict_tools.launcher import RunningServer, launch
from sgl_kvevict.machine import has_fast_bfloat16

Progress = Callable[[str], None]
ENGINE = "kvevict"
"""Of all rows that are measured here."""


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        model: folder.
        prompts: of its tokenizer.
        tasks: names.
        lengths: nominal tokens of the contexts.
        num_questions: at least so many per task; or
        num_contexts: so many contexts per task.
        seed: of the contexts.
        results: the CSV file.
        work: folder for logs and the full cache's distributions.
    """

    model: Path
    prompts: Prompts
    tasks: Sequence[str]
    lengths: Sequence[int]
    num_questions: int
    num_contexts: int | None
    seed: int
    results: Path
    work: Path

    def contexts(self, task: str, tokens: int) -> int:
        """Contexts that hold enough questions."""
        if self.num_contexts is not None:
            return self.num_contexts
        if task in FIDELITY_TASKS:
            return fidelity.PASSAGES
        per_context = len(make_sample(task, tokens, self.seed, 0, self.prompts.count).questions)
        return -(-self.num_questions // per_context)

    def full_path(self, task: str, tokens: int, index: int) -> Path:
        """Where the full cache's distributions of a passage are."""
        return self.work / "full" / f"{self.model.name}-{task}-{tokens}-{index}.json"

    def missing(self, setup: Setup) -> list[tuple[str, int]]:
        """(task, tokens) that have no row with enough contexts yet."""
        done = {row.key: row.contexts for row in read_rows(self.results)}

        def is_missing(task: str, tokens: int) -> bool:
            if task in FIDELITY_TASKS and setup.policy == FULL and not self.full_path(task, tokens, 0).exists():
                return True  # the row is there, but what others are compared with was left on another machine
            key = (ENGINE, setup.policy, setup.options_text, setup.budget, task, tokens, self.model.name, self.seed)
            return done.get(key, 0) < self.contexts(task, tokens)

        return [(task, tokens) for tokens in self.lengths for task in self.tasks if is_missing(task, tokens)]


@dataclass
class _Sums:
    """What is added up over the contexts of a task."""

    scores: list[float]
    divergences: list[float]
    prepared: list[Prepared]
    answer_s: float = 0.0
    exact: list[float] = field(default_factory=list)
    nll: list[float] = field(default_factory=list)

    def answered(self, questions: Sequence[Question], answers: Sequence[str]) -> None:
        """Add the scores of a context's answers."""
        pairs = list(zip(questions, answers, strict=True))
        self.scores += [question.score(answer) for question, answer in pairs]
        self.exact += [question.exact(answer) for question, answer in pairs if isinstance(question, ShortAnswer)]


def run_setup(plan: Plan, setup: Setup, progress: Progress) -> None:
    """Measure everything that is missing for one setup; each finished task is written at once."""
    missing = plan.missing(setup)
    if not missing:
        return
    progress(f"{setup.name}: starting the server for {len(missing)} tasks")
    system = setup.system()
    with launch(plan.model, flags=system.flags, env=system.env, log_path=plan.work / f"{setup.name}.log") as server:
        for task, tokens in missing:
            begin = time.monotonic()
            measure = _fidelity if task in FIDELITY_TASKS else _task
            sums = measure(plan, setup, server, task, tokens)
            row = _row(plan, setup, task, tokens, sums)
            merge_rows(plan.results, [row])
            kl = "" if row.kl is None else f", KL {row.kl:.4f}"
            progress(
                f"{setup.name}: {task} at {tokens}: {row.score:.3f}{kl} over {row.questions}, kept "
                f"{row.kept_share:.3f}, {time.monotonic() - begin:.0f} s"
            )


def _task(plan: Plan, setup: Setup, server: RunningServer, task: str, tokens: int) -> _Sums:
    sums = _Sums([], [], [])
    for index in range(plan.contexts(task, tokens)):
        sample = make_sample(task, tokens, plan.seed, index, plan.prompts.count)
        ids = plan.prompts.context_ids(sample)
        if setup.aware and setup.policy != FULL:  # a full cache answers the same either way
            answers, prompt = ask_aware(server, plan.prompts, sample, ids)
            sums.prepared.append(replace(prompt, seconds=0.0))
            sums.answer_s += prompt.seconds
            sums.answered(sample.questions, answers)
            continue
        sums.prepared.append(prepare(server, ids))
        begin = time.perf_counter()
        answers = ask_all(server, plan.prompts, sample, ids)
        sums.answer_s += time.perf_counter() - begin
        sums.answered(sample.questions, answers)
    return sums


def _fidelity(plan: Plan, setup: Setup, server: RunningServer, task: str, tokens: int) -> _Sums:
    sums = _Sums([], [], [])
    for index in range(plan.contexts(task, tokens)):
        passage = fidelity.make_passage(plan.prompts, task, tokens, index)
        sums.prepared.append(prepare(server, passage.context_ids))
        begin = time.perf_counter()
        found, nll = fidelity.distributions(server, passage)
        sums.nll.append(nll)
        sums.answer_s += time.perf_counter() - begin
        full = _of_full(setup, plan.full_path(task, tokens, index), found)
        sums.divergences += [fidelity.divergence(a, b) for a, b in zip(full, found, strict=True)]
        sums.scores.append(fidelity.agreement(full, found))
    return sums


def _of_full(setup: Setup, stored: Path, found: list[fidelity.Distribution]) -> list[fidelity.Distribution]:
    """What the full cache predicts: found now, then stored for the others."""
    if setup.policy == FULL:
        stored.parent.mkdir(parents=True, exist_ok=True)
        stored.write_text(json.dumps([list(entry.items()) for entry in found]), encoding="utf-8")
    return [dict(entry) for entry in json.loads(stored.read_text(encoding="utf-8"))]


def _served_dtype(model: Path) -> str:
    own = str(json.loads((model / "config.json").read_text(encoding="utf-8"))["dtype"])
    return own if has_fast_bfloat16() else "float32"


def _row(plan: Plan, setup: Setup, task: str, tokens: int, sums: _Sums) -> Row:
    num = len(sums.prepared)
    return Row(
        engine=ENGINE,
        policy=setup.policy,
        options=setup.options_text,
        budget=setup.budget,
        task=task,
        tokens=tokens,
        contexts=num,
        questions=len(sums.divergences) if task in FIDELITY_TASKS else len(sums.scores),
        score=round(fmean(sums.scores), 4),
        kl=_mean(sums.divergences, 5),
        context_tokens=round(sum(p.tokens for p in sums.prepared) / num, 1),
        slots=round(sum(p.slots for p in sums.prepared) / num, 1),
        prepare_s=round(sum(p.seconds for p in sums.prepared) / num, 2),
        answer_s=round(sums.answer_s / num, 2),
        model=plan.model.name,
        dtype=_served_dtype(plan.model),
        seed=plan.seed,
        versions=f"sglang {version('sglang')}, sgl-kvevict {version('sgl-kvevict')}",
        commit=commit(),
        exact=_mean(sums.exact, 4),
        nll=_mean(sums.nll, 5),
        scores=_joined(sums.scores),
    )


def _joined(values: Sequence[float]) -> str:
    return " ".join(f"{value:.4g}" for value in values)


def _mean(values: Sequence[float], digits: int) -> float | None:
    return round(fmean(values), digits) if values else None
