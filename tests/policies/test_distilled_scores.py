"""Scores of ``distilled``: logarithms of predicted attention, and of distances of values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers.statistics import normal
from sgl_kvevict.policies import LayerView, Signal
from sgl_kvevict.policies.methods.distilled import DistilledScorer, relative_norms

HEADS, TOKENS, DIM = 2, 40, 8
SCORER = DistilledScorer()


def view(values: Tensor, **signals: Tensor) -> LayerView:
    """Tokens that lie in the buffers in another order; signals by the names of :class:`Signal`."""
    slots = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(1))
    buffer = torch.zeros_like(values).index_copy(0, slots, values)
    return LayerView(0, 0, torch.zeros_like(buffer), buffer, slots, 1.0, {Signal(k): x for k, x in signals.items()})


def by_hand(values: Tensor, logs: Tensor) -> Tensor:
    """[HEADS, TOKENS], float64: logarithms of attention, and of distances from a head's mean as shares of theirs."""
    distances = torch.zeros(HEADS, TOKENS, dtype=torch.float64)
    for head in range(HEADS):
        mean = sum(values[token, head].double() for token in range(TOKENS)) / TOKENS
        for token in range(TOKENS):
            distances[head, token] = (values[token, head].double() - mean).square().sum().sqrt()
    return logs.double() + (distances / (distances.sum() / (HEADS * TOKENS))).log()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_are_attention_times_the_distance_of_values(dtype: torch.dtype) -> None:
    values = (normal(2, TOKENS, HEADS, DIM) * torch.tensor([1.0, 5.0])[:, None]).to(dtype)
    predicted = normal(4, HEADS, TOKENS) - 4
    got = SCORER.score(view(values, learned_scores=predicted)).values
    torch.testing.assert_close(got.double(), by_hand(values, predicted), atol=1e-4, rtol=1e-4)


def test_what_all_values_share_and_a_layers_scale_do_not_count() -> None:
    """A bias of the values' projection is missed by nobody; values of later layers are longer, and so is what they are
    added to."""
    values = normal(2, TOKENS, HEADS, DIM)
    torch.testing.assert_close(relative_norms(values + 3 * normal(5, HEADS, DIM)), relative_norms(values))
    torch.testing.assert_close(relative_norms(7 * values), relative_norms(values))
    assert relative_norms(torch.ones(TOKENS, HEADS, DIM)).isfinite().all()


def test_without_learned_scores_there_is_no_score() -> None:
    with pytest.raises(ValueError, match="learned_scores"):
        SCORER.score(view(normal(2, TOKENS, HEADS, DIM)))
