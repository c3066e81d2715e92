"""Policies that score a prefix by what its readers attend to."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sgl_kvevict.errors import ConfigError
from sgl_kvevict.policies import LayerView, Policy, Readers, Signal, build_policy
from sgl_kvevict.policies.budgets import AllLayersBudget
from sgl_kvevict.policies.methods.random import RandomScorer
from sgl_kvevict.policies.scorers import SignalScorer
from sgl_kvevict.policies.selectors import TopKSelector

PEAK = 0.9


def weights_with_one_peak(layer: int) -> torch.Tensor:
    """[1 head, 3 queries, 12 tokens]: one query looks at one token only, the others at all alike."""
    rows = torch.full((1, 3, 12), 1 / 12, dtype=torch.float64)
    rows[0, 1] = (1 - PEAK) / 11
    rows[0, 1, 5 + layer] = PEAK
    return rows


@pytest.mark.parametrize("name", ["reconstruction", "questions"])
def test_one_query_is_enough_to_keep_a_token(
    from_weights: Callable[..., Any], kept: Callable[..., Any], name: str
) -> None:
    prompt = from_weights([weights_with_one_peak(layer) for layer in range(3)], tail=3)
    policy = build_policy(name, {"budget_rule": "uniform"})
    assert policy is not None
    assert kept(prompt.run(policy, 3)) == [[[5]], [[6]], [[7]]]


def test_all_layers_compete_by_default(from_weights: Callable[..., Any], kept: Callable[..., Any]) -> None:
    """Layer 1 has all the peaks, so it gets the budget; the floor leaves the others their own best tokens."""
    flat = torch.full((1, 3, 12), 1 / 12, dtype=torch.float64)
    peaks = flat.clone()
    for query, token in enumerate((2, 4, 6)):
        peaks[0, query] = (1 - PEAK) / 11
        peaks[0, query, token] = PEAK
    prompt = from_weights([flat, peaks, flat], tail=3)
    policy = build_policy("reconstruction", {})
    assert policy is not None
    assert kept(prompt.run(policy, 3)) == [[[]], [[2, 4, 6]], [[]]]
    with_floor = build_policy("reconstruction", {"floor_share": 1.0})
    assert with_floor is not None
    assert [len(layer[0]) for layer in kept(prompt.run(with_floor, 6))] == [2, 2, 2]


@pytest.mark.parametrize(
    ("scorer", "readers"), [(SignalScorer(Signal.READER_ATTENTION), None), (RandomScorer(0), Readers.QUESTIONS)]
)
def test_readers_and_reader_attention_go_together(scorer: Any, readers: Readers | None) -> None:
    with pytest.raises(ConfigError, match="reader attention and readers go together"):
        Policy("own", scorer, AllLayersBudget(), TopKSelector(), readers=readers)


READ = [[0.0, 0.2, 0.8]]
LEARNED = [[-5.0, -0.2, -1.0]]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"echo_attention": READ}, READ),
        ({"echo_attention": LEARNED, "reader_attention": READ}, READ),
        ({"echo_attention": READ, "learned_scores": LEARNED}, LEARNED),
        (
            {"reader_attention": READ, "learned_scores": LEARNED},
            [[(-5 + math.log(0.005)) / 2, (-0.2 + math.log(0.205)) / 2, (-1 + math.log(0.805)) / 2]],
        ),
    ],
    ids=["echo", "passes", "learned", "both"],
)
def test_the_default_takes_the_mean_of_what_is_measured_and_what_is_predicted(
    given: dict[str, list[list[float]]], expected: list[list[float]]
) -> None:
    policy = build_policy("distilled", {})
    assert policy is not None
    rows = torch.empty(3, 1, 2)
    signals = {Signal(name): torch.tensor(values) for name, values in given.items()}
    scores = policy.scorer.score(LayerView(0, 0, rows, rows, torch.arange(3), 1.0, signals))
    torch.testing.assert_close(scores.values, torch.tensor(expected))
