from __future__ import annotations

import itertools

import pytest
from kvevict_demo.pressure import documents
from kvevict_demo.progress import Progress
from kvevict_demo.rounds import Spread, ratio


def test_ratios_are_taken_round_by_round() -> None:
    samples = {"stock": [2.0, 4.0, 1.0], "ours": [4.0, 12.0, 1.0]}
    assert ratio(samples, "ours", "stock") == Spread(median=2.0, low=1.0, high=3.0)
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        ratio({"stock": [1.0], "ours": [1.0, 2.0]}, "ours", "stock")
    with pytest.raises(ValueError, match="no rounds of ours and stock"):
        ratio({"stock": [], "ours": []}, "ours", "stock")


def test_a_spread_shows_its_range_where_there_is_one() -> None:
    assert Spread.of([3.0, 1.0, 2.0]).text(1) == "2.0 (1.0-3.0)"
    assert Spread.of([2000.0]).text(0) == "2,000"


def test_what_is_left_follows_how_long_steps_really_take() -> None:
    lines: list[str] = []
    now = 0.0
    progress = Progress(lines.append, clock=lambda: now)
    progress.expect(30.0)
    progress.step("first", 10.0)
    now = 20.0  # twice as long as expected
    progress.step("second", 15.0)
    progress.note("something within it")
    now = 50.0
    progress.step("third", 5.0)
    now = 60.0
    progress.step("end")
    assert lines == [
        "    0 s  first  (about 30 s left)",
        "   20 s  second  (about 40 s left)",
        "   20 s    something within it",
        "   50 s  third  (about 10 s left)",
        "   60 s  end",
    ]


def test_documents_differ_from_the_first_words_on() -> None:
    texts = list(itertools.islice(documents(), 30))
    assert len({text.split("Document ")[1].split(".")[0] for text in texts}) == 30
    assert {len(text.split()) for text in texts} == {len(texts[0].split())}
