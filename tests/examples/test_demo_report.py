from __future__ import annotations

import dataclasses
import io
import json
import re

import pytest
from kvevict_demo.programs import Answer
from kvevict_demo.questions import BRANCH_QUESTIONS, CHAT_QUESTIONS
from kvevict_demo.report import answers_table, figures_table, json_line, summary
from kvevict_demo.systems import NOTHING_COMPRESSED, OURS, STOCK, Figures, Rounds
from rich.console import Console
from rich.table import Table

REQUIRED = {
    *("prefix_tokens", "prefix_slots", "documents_that_fit", "sharers", "right_answers"),
    *("rounds", "ratios", "pool_leaks", "budget", "policy"),
}
POOL = 6000


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
        document_tokens=1000,
        document_slots=1000,
        branch_answers=answers(len(BRANCH_QUESTIONS), 7),
        chat_answers=answers(len(CHAT_QUESTIONS), 3),
        checker_complaints=(),
        leaked_slots=0,
    )
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


@pytest.fixture
def runs() -> list[Figures]:
    ours = figures(OURS, prefix_slots=586, document_slots=230, state={"span_tokens": 2768, "span_slots": 554})
    return [figures(STOCK), figures(NOTHING_COMPRESSED, chat_answers=answers(len(CHAT_QUESTIONS), 4)), ours]


@pytest.fixture
def rounds() -> Rounds:
    def each(stock: list[float], nothing: list[float], ours: list[float]) -> dict[str, list[float]]:
        return {STOCK: stock, NOTHING_COMPRESSED: nothing, OURS: ours}

    return Rounds(
        ttft_cold_s=each([4.0, 4.0, 4.0], [5.0, 5.0, 5.0], [4.0, 4.0, 4.0]),
        ttft_cached_s=each([2.0, 3.0, 2.5], [0.1, 0.1, 0.1], [0.2, 0.1, 0.2]),
        decode_tokens_per_s=each([5.0, 6.0, 5.0], [20.0, 18.0, 10.1], [20.126, 18.0, 20.2]),
        requests_per_s=each([0.5, 0.5, 0.6], [0.8, 1.0, 0.9], [2.0, 2.5, 1.8]),
        found_share=each([0.0, 0.0, 0.125], [0.125, 0.0, 0.0], [1.0, 1.0, 0.875]),
    )


def rendered(table: Table) -> str:
    out = io.StringIO()
    Console(file=out, width=200).print(table)
    return out.getvalue()


def cells(text: str, label: str) -> list[str]:
    line = next(line for line in text.splitlines() if label in line)
    return [cell.strip() for cell in line.split("│")[2:-1]]


def test_summary_has_every_promised_figure_from_the_right_run(runs: list[Figures], rounds: Rounds) -> None:
    line = summary(runs, rounds, POOL, policy="ada-snapkv", budget=0.2, is_in_turn=True)
    assert line.keys() >= REQUIRED
    assert line["prefix_slots"] == {STOCK: 2800, NOTHING_COMPRESSED: 2800, OURS: 586}
    assert line["documents_that_fit"] == {STOCK: 6, NOTHING_COMPRESSED: 6, OURS: 26}
    assert (line["compressed_tokens"], line["compressed_slots"]) == (2768, 554)
    assert line["right_answers"] == {STOCK: 10, NOTHING_COMPRESSED: 11, OURS: 10}
    assert line["answers"] == len(BRANCH_QUESTIONS) + len(CHAT_QUESTIONS)
    assert line["rounds"]["ttft_cached_s"][OURS] == [0.2, 0.1, 0.2]
    assert line["ratios"][STOCK]["requests_per_s"] == [4.0, 3.0, 5.0]
    assert line["ratios"][NOTHING_COMPRESSED]["requests_per_s"] == [2.5, 2.0, 2.5]
    assert "found_share" not in line["ratios"][STOCK]


def test_what_was_not_measured_in_turn_has_no_ratio(runs: list[Figures], rounds: Rounds) -> None:
    assert summary(runs, rounds, POOL, policy="p", budget=1, is_in_turn=False)["ratios"] == {}
    text = rendered(figures_table(runs, rounds, POOL, is_in_turn=False))
    assert cells(text, "decode tokens/s")[-2:] == ["not in turn"] * 2
    assert cells(text, "token slots held")[-2:] == ["0.21x"] * 2


def test_leaks_of_all_runs_and_both_checkers_add_up(runs: list[Figures], rounds: Rounds) -> None:
    def leaks(*runs: Figures) -> object:
        return summary(runs, rounds, POOL, policy="p", budget=1, is_in_turn=True)["pool_leaks"]

    assert leaks(*runs) == 0
    stock, nothing, ours = runs
    stock = dataclasses.replace(stock, checker_complaints=("pool memory leak detected!",))
    assert leaks(stock, nothing, dataclasses.replace(ours, leaked_slots=3)) == 4


def test_runs_that_saw_different_prefixes_are_not_compared(runs: list[Figures], rounds: Rounds) -> None:
    stock, *others = runs
    shorter = dataclasses.replace(stock, prefix_tokens=2799)
    with pytest.raises(ValueError, match=r"\[2799, 2800\]"):
        summary([shorter, *others], rounds, POOL, policy="p", budget=0.2, is_in_turn=True)


def test_json_line_is_one_line_of_strict_json() -> None:
    text = json_line({"a": 1, "b": "x\ny"})
    assert "\n" not in text
    assert json.loads(text) == {"a": 1, "b": "x\ny"}
    with pytest.raises(ValueError):
        json_line({"a": float("nan")})


def test_figures_stand_side_by_side_with_their_spread(runs: list[Figures], rounds: Rounds) -> None:
    text = rendered(figures_table(runs, rounds, POOL, is_in_turn=True))
    assert "6,000 token slots" in text
    assert cells(text, "token slots held for 2,800") == ["2,800", "2,800", "586", "0.21x", "0.21x"]
    assert cells(text, "documents of 1,000 tokens that fit") == ["6", "6", "26", "4.33x", "4.33x"]
    assert cells(text, "right answers") == ["10 of 12", "11 of 12", "10 of 12", "", ""]
    decode = ["5.0 (5.0-6.0)", "18.0 (10.1-20.0)", "20.1 (18.0-20.2)", "4.03 (3.00-4.04) x", "1.01 (1.00-2.00) x"]
    assert cells(text, "decode tokens/s") == decode
    assert cells(text, "first token, nothing cached") == ["4.00 s", "5.00 s", "4.00 s", "1.00 x", "0.80 x"]
    assert cells(text, "found their document") == ["0 %", "0 %", "100 %", "", ""]
    order = ["token slots held", "that fit", "right answers", "first token of a question", "requests/s", "decode"]
    places = [re.search(label, text).start() for label in order]  # type: ignore[union-attr]
    assert places == sorted(places)


def test_answers_are_marked_and_printed_as_they_are(runs: list[Figures]) -> None:
    text = rendered(answers_table(runs))
    assert "✓ text [b]0[/b]" in text
    assert "✗ text [b]7[/b]" in text
    assert all(question.text in text for question in BRANCH_QUESTIONS[:3])
