"""Policies that score a prefix by what its readers attend to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sgl_kvevict.policies import Policy, Signal, build_policy
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


def test_one_query_is_enough_to_keep_a_token(from_weights: Callable[..., Any], kept: Callable[..., Any]) -> None:
    prompt = from_weights([weights_with_one_peak(layer) for layer in range(3)], tail=3)
    policy = build_policy("reconstruction", {"budget_rule": "uniform"})
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


@pytest.mark.parametrize(("scorer", "waits"), [(SignalScorer(Signal.READER_ATTENTION), True), (RandomScorer(0), False)])
def test_who_scores_by_reader_attention_waits_for_passes(scorer: Any, waits: bool) -> None:
    assert Policy("own", scorer, AllLayersBudget(), TopKSelector()).needs_passes is waits
