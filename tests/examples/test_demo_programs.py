from __future__ import annotations

from kvevict_demo.programs import Answer, max_overlap


def answer(started: float, finished: float) -> Answer:
    return Answer(text="", right=True, cached_tokens=0, started=started, finished=finished)


def test_overlap_counts_requests_worked_on_at_one_moment() -> None:
    assert max_overlap([answer(0, 2), answer(1, 3), answer(1.5, 4), answer(3.5, 5)]) == 3


def test_overlap_ignores_requests_that_follow_each_other() -> None:
    assert max_overlap([answer(0, 1), answer(1, 2)]) == 1
    assert max_overlap([]) == 0
