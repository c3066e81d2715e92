"""The tables for people and the JSON line for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from .questions import BRANCH_QUESTIONS, CHAT_QUESTIONS
from .rounds import Samples, Spread, ratio
from .systems import BASELINES, OURS, Figures, Rounds


def right_answers(figures: Figures) -> int:
    """How many answers of both programs hold the expected fact."""
    return sum(answer.right for answer in (*figures.branch_answers, *figures.chat_answers))


def num_answers(figures: Figures) -> int:
    """How many questions were asked in both programs."""
    return len(figures.branch_answers) + len(figures.chat_answers)


def figures_table(runs: Sequence[Figures], rounds: Rounds, pool_slots: int, *, is_in_turn: bool) -> Table:
    """What holds on any machine, then what was measured in rounds: medians (lowest-highest).

    Args:
        runs: what was found on the baselines, then on ours.
        rounds: what was measured on all of them.
        pool_slots: of each.
        is_in_turn: the rounds of all alternated; if not, no ratio is shown.
    """
    ours = runs[-1]
    table = Table(title=f"Same programs, same pool of {pool_slots:,} token slots")
    for column in ("", *(run.name for run in runs), *(f"ours to {name}" for name in BASELINES)):
        table.add_column(column, justify="left" if column == "" else "right")

    def counted(label: str, *cells: int, has_ratio: bool = True) -> None:
        quotients = [f"{cells[-1] / cell:.2f}x" if has_ratio and cell else "" for cell in cells[:-1]]
        table.add_row(label, *(f"{cell:,}" for cell in cells), *quotients)

    def measured(label: str, samples: Samples, digits: int, unit: str = "") -> None:
        cells = [Spread.of(samples[run.name]).text(digits) + unit for run in runs]
        ratios = [ratio(samples, OURS, name).text(2) + " x" if is_in_turn else "not in turn" for name in BASELINES]
        table.add_row(label, *cells, *ratios)

    counted(f"token slots held for {ours.prefix_tokens:,} tokens", *(run.prefix_slots for run in runs))
    fitting = [run.documents_that_fit(pool_slots) for run in runs]
    counted(f"documents of {ours.document_tokens:,} tokens that fit the pool", *fitting)
    table.add_row("right answers", *(f"{right_answers(run)} of {num_answers(run)}" for run in runs))
    counted("requests that read one copy at once", *(run.sharers for run in runs), has_ratio=False)
    counted("pool leaks", *(run.pool_leaks for run in runs), has_ratio=False)
    table.add_section()
    measured("first token of a question, document cached", rounds.ttft_cached_s, 2, " s")
    measured("requests/s, documents of 4 times the pool", rounds.requests_per_s, 2)
    found = [f"{100 * Spread.of(rounds.found_share[run.name]).median:.0f} %" for run in runs]
    table.add_row("  requests that found their document cached", *found)
    measured("decode tokens/s, one request", rounds.decode_tokens_per_s, 1)
    measured("first token, nothing cached", rounds.ttft_cold_s, 2, " s")
    return table


def answers_table(runs: Sequence[Figures]) -> Table:
    """Every question of both programs with the answer of each system; wrong ones are marked."""
    table = Table(title="Answers (forked program, then chat)", show_lines=True)
    table.add_column("question")
    for run in runs:
        table.add_column(run.name, overflow="fold")
    questions = (*BRANCH_QUESTIONS, *CHAT_QUESTIONS)
    columns = [(*run.branch_answers, *run.chat_answers) for run in runs]
    for question, *answers in zip(questions, *columns, strict=True):
        asked = f"{question.text} {question.lead} ..." if question.lead else question.text
        cells = [("✓ " if answer.right else "✗ ") + " ".join(answer.text.split()) for answer in answers]
        table.add_row(asked, *(cell.replace("[", "\\[") for cell in cells))
    return table


def summary(
    runs: Sequence[Figures],
    rounds: Rounds,
    pool_slots: int,
    *,
    policy: str,
    budget: float | int,
    is_in_turn: bool,
) -> dict[str, Any]:
    """The figures of the last line of output: token slots, logical tokens, seconds; rounds as median, low, high.

    ``runs`` are those of :func:`figures_table`.

    Raises:
        ValueError: the systems did not see the same prefix, so that nothing can be compared.
    """
    ours = runs[-1]
    if len(seen := sorted({run.prefix_tokens for run in runs})) > 1:
        raise ValueError(f"the systems saw prefixes of different lengths: {seen}")
    measured: Mapping[str, Samples] = vars(rounds)
    compared = [name for name in measured if name != "found_share"]
    ratios = {
        baseline: {metric: _numbers(ratio(measured[metric], OURS, baseline)) for metric in compared}
        for baseline in BASELINES
    }
    return {
        "prefix_tokens": ours.prefix_tokens,
        "prefix_slots": {run.name: run.prefix_slots for run in runs},
        "compressed_tokens": ours.state.get("span_tokens"),
        "compressed_slots": ours.state.get("span_slots"),
        "documents_that_fit": {run.name: run.documents_that_fit(pool_slots) for run in runs},
        "sharers": ours.sharers,
        "right_answers": {run.name: right_answers(run) for run in runs},
        "answers": num_answers(ours),
        "pool_leaks": sum(run.pool_leaks for run in runs),
        "rounds": {
            metric: {run.name: _numbers(Spread.of(samples[run.name])) for run in runs}
            for metric, samples in measured.items()
        },
        "ratios": ratios if is_in_turn else {},
        "budget": budget,
        "policy": policy,
    }


def json_line(figures: dict[str, Any]) -> str:
    """One line of JSON; refuses NaN and infinities, which are no JSON."""
    return json.dumps(figures, allow_nan=False)


def _numbers(spread: Spread) -> list[float]:
    return [round(value, 3) for value in (spread.median, spread.low, spread.high)]
