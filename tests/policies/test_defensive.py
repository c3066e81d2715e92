"""Scores for questions that nobody has asked yet, from the prefill alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from defensive import RobustAttentionScorer
from torch import Tensor

from helpers.own_policies import OWN_POLICIES
from sgl_kvevict.policies import Policy, Signal, build_policy
from sgl_kvevict.policies.signals import output_gram


def policy(name: str, **options: Any) -> Policy:
    built = build_policy(OWN_POLICIES.get(name, name), options)
    assert built is not None
    return built


def robust_scores(prompt: Any, scorer: RobustAttentionScorer, gram: Tensor) -> Tensor:
    return scorer.score(prompt.show(0).with_signals({Signal.OUTPUT_GRAM: gram})).values


def test_defensive_takes_the_largest_attention_floored_by_its_mean(from_weights: Callable[..., Any]) -> None:
    rows = torch.tensor([[[0.1, 0.5, 0.1, 0.1, 0.2, 0.0, 0.0], [0.1, 0.1, 0.1, 0.6, 0.1, 0.0, 0.0]]]).double()
    prompt = from_weights([rows], tail=2)
    gram = torch.eye(7)[None]
    plain = robust_scores(prompt, RobustAttentionScorer(use_floor=False, use_value_norm=False), gram)
    torch.testing.assert_close(plain, torch.tensor([[0.1, 0.5, 0.1, 0.6, 0.2]]))
    floored = robust_scores(prompt, RobustAttentionScorer(use_value_norm=False), gram)
    torch.testing.assert_close(floored, torch.tensor([[0.3, 0.5, 0.3, 0.6, 0.3]]))


def test_defensive_weighs_by_what_a_value_adds(random_prompt: Callable[..., Any]) -> None:
    prompt = random_prompt(length=30)
    projection = torch.randn(3, 2, 8, 20, generator=torch.Generator().manual_seed(3))  # [KV head, group, head_dim, out]
    gram = output_gram(projection.reshape(6 * 8, 20).t(), 3, 8)
    scores = robust_scores(prompt, RobustAttentionScorer(), gram)
    plain = robust_scores(prompt, RobustAttentionScorer(use_value_norm=False), gram)
    added = torch.einsum("nhd,hgdo->hngo", prompt.values[0][prompt.start : prompt.end], projection)
    torch.testing.assert_close(scores, plain * added.flatten(2).norm(dim=-1), rtol=1e-4, atol=1e-5)


def test_missing_signals_are_named(random_prompt: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="needs output_gram of layer 0, got none"):
        policy("defensive").scorer.score(random_prompt(length=30).show(0))


def test_what_they_ask_of_the_forward() -> None:
    assert policy("defensive").needs == {Signal.WINDOW_QUERIES, Signal.KEYS, Signal.VALUES, Signal.OUTPUT_GRAM}
    assert Signal.OUTPUT_GRAM not in policy("defensive", use_value_norm=False).needs
