"""The tables for people and the JSON line for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from .questions import BRANCH_QUESTIONS, CHAT_QUESTIONS
from .systems import Figures


def right_answers(figures: Figures) -> int:
    """How many answers of both programs hold the expected fact."""
    return sum(answer.right for answer in (*figures.branch_answers, *figures.chat_answers))


def num_answers(figures: Figures) -> int:
    """How many questions were asked in both programs."""
    return len(figures.branch_answers) + len(figures.chat_answers)


def figures_table(runs: Sequence[Figures], pool_slots: int) -> Table:
    """One column for each system, one row for each figure."""
    table = Table(title=f"Same programs, same pool of {pool_slots:,} token slots")
    table.add_column("")
    for run in runs:
        table.add_column(run.name, justify="right")
    rows = {
        "prefix tokens": [f"{run.prefix_tokens:,}" for run in runs],
        "token slots held for them": [f"{run.prefix_slots:,}" for run in runs],
        "requests sharing them at once": [str(run.sharers) for run in runs],
        "cached tokens, all requests": [f"{run.cached_tokens:,}" for run in runs],
        "decode tokens/s, one request": [f"{run.decode_tokens_per_s:.1f}" for run in runs],
        "first token, nothing cached": [f"{run.ttft_cold_s:.2f} s" for run in runs],
        "first token, prefix cached": [f"{run.ttft_cached_s:.2f} s" for run in runs],
        "scored after the prefill for": [f"{run.scoring_s:.1f} s" for run in runs],
        "all branches answered in": [f"{run.branches_s:.1f} s" for run in runs],
        "right answers": [f"{right_answers(run)} of {num_answers(run)}" for run in runs],
        "pool leaks": [str(run.pool_leaks) for run in runs],
    }
    for label, cells in rows.items():
        table.add_row(label, *cells)
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


def summary(stock: Figures, full: Figures, compressed: Figures, *, policy: str, budget: float | int) -> dict[str, Any]:
    """The figures of the last line of output: token slots, logical tokens, tokens per second, seconds.

    Raises:
        ValueError: the systems did not see the same prefix, so that nothing can be compared.
    """
    seen = {run.prefix_tokens for run in (stock, full, compressed)}
    if len(seen) != 1:
        raise ValueError(f"the systems saw prefixes of different lengths: {sorted(seen)}")
    runs = {"stock": stock, "full": full, "compressed": compressed}
    return {
        "prefix_tokens": compressed.prefix_tokens,
        "prefix_slots": compressed.prefix_slots,
        "full_prefix_slots": full.prefix_slots,
        "stock_prefix_slots": stock.prefix_slots,
        "compressed_tokens": compressed.state.get("compressed_tokens"),
        "compressed_slots": compressed.state.get("compressed_slots"),
        "sharers": compressed.sharers,
        "decode_tokens_per_s": round(compressed.decode_tokens_per_s, 2),
        "full_decode_tokens_per_s": round(full.decode_tokens_per_s, 2),
        "stock_decode_tokens_per_s": round(stock.decode_tokens_per_s, 2),
        "ttft_cold_s": {name: round(run.ttft_cold_s, 3) for name, run in runs.items()},
        "ttft_cached_s": {name: round(run.ttft_cached_s, 3) for name, run in runs.items()},
        "scoring_s": round(compressed.scoring_s, 2),
        "right_answers": {name: right_answers(run) for name, run in runs.items()},
        "answers": num_answers(compressed),
        "pool_leaks": sum(run.pool_leaks for run in runs.values()),
        "budget": budget,
        "policy": policy,
    }


def json_line(figures: dict[str, Any]) -> str:
    """One line of JSON; refuses NaN and infinities, which are no JSON."""
    return json.dumps(figures, allow_nan=False)
