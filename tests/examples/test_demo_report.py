from __future__ import annotations

import dataclasses
import io
import json
import re

import pytest
from kvevict_demo.programs import Answer
from kvevict_demo.questions import BRANCH_QUESTIONS, CHAT_QUESTIONS
from kvevict_demo.report import answers_table, figures_table, json_line, summary
from kvevict_demo.systems import Figures
from rich.console import Console
from rich.table import Table

REQUIRED = {
    *("prefix_tokens", "prefix_slots", "stock_prefix_slots", "sharers", "decode_tokens_per_s"),
    *("full_decode_tokens_per_s", "stock_decode_tokens_per_s", "pool_leaks", "budget", "policy"),
}


def answers(count: int, right: int) -> tuple[Answer, ...]:
    return tuple(
        Answer(text=f"text [b]{i}[/b]", right=i < right, cached_tokens=100, started=0.0, finished=1.0)
        for i in range(count)
    )


def figures(name: str, **changes: object) -> Figures:
    base = Figures(
        name=name,
        prefix_tokens=2800,
        prefix_slots=2800,
        sharers=8,
        cached_tokens=33_000,
        decode_tokens_per_s=5.0,
        ttft_cold_s=4.0,
        ttft_cached_s=0.5,
        scoring_s=3.0,
        branches_s=20.0,
        branch_answers=answers(len(BRANCH_QUESTIONS), 7),
        chat_answers=answers(len(CHAT_QUESTIONS), 3),
        checker_complaints=(),
        leaked_slots=0,
        seconds=100.0,
    )
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


@pytest.fixture
def runs() -> tuple[Figures, Figures, Figures]:
    state = {"compressed_tokens": 2768, "compressed_slots": 554}
    compressed = figures("budget 0.2", prefix_slots=586, decode_tokens_per_s=20.126, state=state)
    return figures("stock"), figures("budget 1.0", decode_tokens_per_s=9.0), compressed


def rendered(table: Table) -> str:
    out = io.StringIO()
    Console(file=out, width=200).print(table)
    return out.getvalue()


def test_summary_has_every_promised_figure_from_the_right_run(
    runs: tuple[Figures, Figures, Figures],
) -> None:
    line = summary(*runs, policy="ada-snapkv", budget=0.2)
    assert line.keys() >= REQUIRED
    assert line["prefix_slots"] == 586
    assert line["stock_prefix_slots"] == 2800
    assert (line["compressed_tokens"], line["compressed_slots"]) == (2768, 554)
    assert line["decode_tokens_per_s"] == 20.13
    assert line["full_decode_tokens_per_s"] == 9.0
    assert line["stock_decode_tokens_per_s"] == 5.0
    assert line["right_answers"] == {"stock": 10, "full": 10, "compressed": 10}
    assert line["answers"] == len(BRANCH_QUESTIONS) + len(CHAT_QUESTIONS)


def test_leaks_of_all_runs_and_both_checkers_add_up(runs: tuple[Figures, Figures, Figures]) -> None:
    stock, full, compressed = runs
    assert summary(stock, full, compressed, policy="p", budget=1)["pool_leaks"] == 0
    full = dataclasses.replace(full, checker_complaints=("pool memory leak detected!",))
    compressed = dataclasses.replace(compressed, leaked_slots=3)
    assert summary(stock, full, compressed, policy="p", budget=1)["pool_leaks"] == 4


def test_runs_that_saw_different_prefixes_are_not_compared(runs: tuple[Figures, Figures, Figures]) -> None:
    stock, full, compressed = runs
    with pytest.raises(ValueError, match=r"\[2799, 2800\]"):
        summary(dataclasses.replace(stock, prefix_tokens=2799), full, compressed, policy="p", budget=0.2)


def test_json_line_is_one_line_of_strict_json() -> None:
    text = json_line({"a": 1, "b": "x\ny"})
    assert "\n" not in text
    assert json.loads(text) == {"a": 1, "b": "x\ny"}
    with pytest.raises(ValueError):
        json_line({"a": float("nan")})


def test_figures_stand_side_by_side(runs: tuple[Figures, Figures, Figures]) -> None:
    text = rendered(figures_table(runs, 6000))
    assert "6,000 token slots" in text
    slots = next(line for line in text.splitlines() if "token slots held" in line)
    assert re.findall(r"[\d,]+", slots) == ["2,800", "2,800", "586"]
    assert "10 of 12" in text


def test_answers_are_marked_and_printed_as_they_are(runs: tuple[Figures, Figures, Figures]) -> None:
    text = rendered(answers_table(runs))
    assert "✓ text [b]0[/b]" in text
    assert "✗ text [b]7[/b]" in text
    assert all(question.text in text for question in BRANCH_QUESTIONS[:3])
