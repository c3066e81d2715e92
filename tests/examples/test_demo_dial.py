"""The demo's table: answers, and what they were read from, side by side for each size of the document."""

from __future__ import annotations

import importlib.util
import io
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from kvevict_demo.ask import Streamed
from kvevict_demo.log import LOG_QUESTION, log_text
from kvevict_demo.questions import BRANCH_QUESTIONS
from rich.console import Console

RUN = Path(__file__).resolve().parents[2] / "examples" / "demo" / "run.py"


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo_run", RUN)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["demo_run"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def meta(compressed: int, *percent: int, is_done: bool = True) -> dict[str, Any]:
    keys = ("kvevict_percent_16_bits", "kvevict_percent_8_bits", "kvevict_percent_4_bits")
    details = {"device": 2810, "kvevict_compressed": compressed} | dict(zip(keys, percent, strict=False))
    reason = {"type": "length"} if is_done else None
    return {"prompt_tokens": 2840, "cached_tokens": 2810, "cached_tokens_details": details, "finish_reason": reason}


def test_sizes_and_answers_stand_side_by_side(demo: ModuleType) -> None:
    whole = demo.Reading(1.0, 2810, [Streamed(q, q.expected[0], meta(0)) for q in BRANCH_QUESTIONS])
    fifth = demo.Reading(0.2, 588, [Streamed(q, "no [/b]", meta(2778, 4, 10, 40)) for q in BRANCH_QUESTIONS])
    now = demo.Reading(0.05, 171, [Streamed(q, "Perh", meta(2778, is_done=False)) for q in BRANCH_QUESTIONS[:1]])
    now.answers = [*now.answers, *map(Streamed, BRANCH_QUESTIONS[1:])]
    out = io.StringIO()
    Console(file=out, width=110).print(demo.dial_table((1.0, 0.2, 0.05, None), [whole, fifth, now]))
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    assert max(map(len, lines)) <= 110
    cells = {line[:41].strip(): line[41:].split("  ") for line in lines}
    cells = {name: [cell.strip() for cell in row if cell.strip()] for name, row in cells.items()}
    assert cells["share of the handbook's bytes"] == ["1", "0.2", "0.05", "complete"]
    assert cells["Who is the keeper of the station?"] == ["✓ Tomas Brandt", "✗ no [/b]", "Perh"]
    assert cells["What is the name of the goat?"] == ["✓ Clover", "✗ no [/b]"]
    assert cells["token slots"] == ["2,810", "588", "171"]
    assert cells["entries read"] == ["100%, 16.0 bits", "54%, 5.6 bits"]
    assert cells["right answers"] == ["8 of 8", "0 of 8"]
    figures = {"share": 0.2, "slots": 588, "share_of_entries": 0.54, "bits": 5.63, "right_answers": 0}
    assert fifth.figures() == figures | {"cached_tokens": 8 * 2810}


@pytest.mark.parametrize("num_days", [10, 100, 200])
def test_the_log_has_as_many_days_and_its_answer_once(num_days: int) -> None:
    text = log_text(num_days)
    assert text.count("Beaufort") == num_days
    assert sum(text.count(piece) for piece in LOG_QUESTION.expected) == 1
