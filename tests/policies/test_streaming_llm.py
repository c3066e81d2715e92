from __future__ import annotations

from helpers.decisions import Run, built, of_paper


def test_sinks_and_recent_tokens(random_prompt: Run, kept: Run) -> None:
    """specs/ada_kv.md 9.26: n = 100, b = 10."""
    policy = of_paper("streaming-llm")
    assert not policy.needs and policy.scorer.window_size == 0
    prompt = random_prompt(length=100, tail=0, window=0)
    expected = [0, 1, 2, 3, 94, 95, 96, 97, 98, 99]
    assert kept(prompt.run(policy, 9 * 10)) == [[expected] * 3] * 3


def test_a_later_range_of_a_path_has_no_sinks(random_prompt: Run, kept: Run) -> None:
    policy = built("streaming-llm", num_sink_tokens=6)
    late = random_prompt(length=100, tail=0, window=0, start=50)
    assert kept(late.run(policy, 9 * 3)) == [[[47, 48, 49]] * 3] * 3
    straddling = random_prompt(length=100, tail=0, window=0, start=5)
    assert kept(straddling.run(policy, 9 * 3)) == [[[0, 93, 94]] * 3] * 3


def test_caller_may_protect_more(random_prompt: Run, kept: Run) -> None:
    policy = built("streaming-llm", num_sink_tokens=0)
    prompt = random_prompt(length=30, tail=0, window=0)
    assert kept(prompt.run(policy, 9 * 5, protected=2))[0][0] == [0, 1, 27, 28, 29]
