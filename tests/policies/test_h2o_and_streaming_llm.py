from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers.decisions import Run, built, of_paper
from sgl_kvevict.policies import LayerView, RangeScores, Signal
from sgl_kvevict.policies.selectors import HeavyHitterSelector


@pytest.mark.parametrize(
    ("budget", "ratio", "recent"), [(256, 0.25, 64), (252, 0.25, 63), (196, 0.25, 49), (10, 0.5, 5), (7, 0.0, 0)]
)
def test_split_into_heavy_hitters_and_recent(budget: int, ratio: float, recent: int) -> None:
    """specs/d2o.md 4: S_l 256, T 4 gives N 189, M 63; here the sinks are already taken out."""
    values = torch.linspace(2, 1, 600)[None, None]  # falling: all heavy hitters are at the start
    kept = HeavyHitterSelector(ratio).select(RangeScores(values, None, None, 0, 0), torch.tensor([[budget]]))
    positions = kept[0, 0].nonzero().flatten().tolist()
    assert positions == list(range(budget - recent)) + list(range(600 - recent, 600))


def test_policy_keeps_heavy_hitters_and_recent(random_prompt: Run, kept: Run) -> None:
    policy = built("h2o")
    assert policy.needs == {Signal.ACCUMULATED_ATTENTION} and policy.scorer.window_size == 0
    prompt = random_prompt()
    for layer, runs in enumerate(kept(prompt.run(policy, 9 * 20))):
        for sums, run in zip(prompt.show(layer).signals[Signal.ACCUMULATED_ATTENTION], runs, strict=True):
            heavy = sorted(range(62), key=lambda i, sums=sums: (-float(sums[i]), i))[:10]
            assert run == sorted(heavy) + list(range(62, 72))


def test_uniform_attention_keeps_the_first_tokens(from_weights: Run, kept: Run) -> None:
    """specs/ada_kv.md 9.24: column sums fall; the last token, which is always stored, counts to the budget of 4."""
    rows = torch.tril(torch.ones(6, 6, dtype=torch.float64))
    prompt = from_weights([(rows / rows.sum(1, keepdim=True))[None]], tail=1)
    assert kept(prompt.run(of_paper("h2o"), 3)) == [[[0, 1, 4]]]


def test_normalised_by_the_queries_that_saw_a_token(random_prompt: Run) -> None:
    """kvpress' ObservedAttention: sums divided by n, n - 1, ..., here for a range that starts later."""
    prompt = random_prompt(start=10)
    scores = built("h2o", normalize="queries", recent_ratio=0.0).scorer.score(prompt.show(0)).values
    torch.testing.assert_close(scores, prompt.show(0).signals[Signal.ACCUMULATED_ATTENTION] / torch.arange(70, 8, -1))


@pytest.mark.parametrize(
    ("num_tokens", "message"), [(None, "of layer 0, got none"), (71, r"\(3, 72\) of layer 0, got \(3, 71\)")]
)
def test_missing_sums_are_refused(random_prompt: Run, num_tokens: int | None, message: str) -> None:
    prompt = random_prompt()

    def show(layer: int) -> LayerView:
        view = prompt.show(layer)
        sums = view.need_per_token(Signal.ACCUMULATED_ATTENTION)
        signals = {} if num_tokens is None else {Signal.ACCUMULATED_ATTENTION: sums[:, :num_tokens]}
        return replace(view, signals=signals)

    with pytest.raises(ValueError, match=f"needs accumulated_attention {message}"):
        built("h2o").order(show, prompt.geometry, 90, 0)


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
