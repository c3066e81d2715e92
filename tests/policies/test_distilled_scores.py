"""Scores of ``distilled``: logarithms of attention, measured or predicted or both, and of distances of values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sgl_kvevict.policies import LayerView, Signal
from sgl_kvevict.policies.methods.distilled import DistilledScorer, relative_norms
from sgl_kvevict.policies.scorers import joint_attention

HEADS, TOKENS, DIM = 2, 40, 8
SCORER = DistilledScorer(use_window=True)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


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
    measured, predicted = normal(3, HEADS, TOKENS).square() / 10, normal(4, HEADS, TOKENS) - 4
    measured[0, :5] = 0  # never read
    logs = {
        "measured": (measured + 0.005).log(),
        "predicted": predicted,
        "both": ((measured + 0.005).log() + predicted) / 2,
    }
    signals = {
        "measured": {"reader_attention": measured},
        "predicted": {"learned_scores": predicted},
        "both": {"reader_attention": measured, "learned_scores": predicted},
    }
    for name, expected in logs.items():
        got = SCORER.score(view(values, **signals[name])).values
        torch.testing.assert_close(got.double(), by_hand(values, expected), atol=1e-4, rtol=1e-4)


def test_what_all_values_share_and_a_layers_scale_do_not_count() -> None:
    """A bias of the values' projection is missed by nobody; values of later layers are longer, and so is what they are
    added to."""
    values = normal(2, TOKENS, HEADS, DIM)
    torch.testing.assert_close(relative_norms(values + 3 * normal(5, HEADS, DIM)), relative_norms(values))
    torch.testing.assert_close(relative_norms(7 * values), relative_norms(values))
    assert relative_norms(torch.ones(TOKENS, HEADS, DIM)).isfinite().all()


def test_without_passes_and_learned_scores_there_is_no_score() -> None:
    with pytest.raises(ValueError, match="reader_attention"):
        SCORER.score(view(normal(2, TOKENS, HEADS, DIM)))


def test_joint_attention_is_the_mean_of_logarithms() -> None:
    measured, predicted = torch.tensor([0.0, 0.995, 0.495]), torch.tensor([0.0, -3.0, -6.0])
    expected = [(-5.298317 + 0) / 2, (0 - 3) / 2, (-0.693147 - 6) / 2]
    assert joint_attention(measured, predicted).tolist() == pytest.approx(expected)
