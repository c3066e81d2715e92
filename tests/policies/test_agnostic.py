from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from helpers.decisions import OWN_POLICIES, Run, built
from helpers.statistics import normal
from kvevict_kernels.rotary import Rotary
from sgl_kvevict.errors import ConfigError
from sgl_kvevict.policies import LayerView, Signal
from sgl_kvevict.policies.methods.distilled import DistilledScorer, relative_norms


def test_knorm_keeps_small_keys(random_prompt: Run, kept: Run) -> None:
    prompt = random_prompt()
    for layer, runs in enumerate(kept(prompt.run(built(OWN_POLICIES["knorm"]), 9 * 15))):
        norms = prompt.keys[layer][:72].norm(dim=-1)
        for head, run in enumerate(runs):
            assert run == sorted(norms[:, head].argsort(stable=True)[:15].tolist())
    with pytest.raises(ConfigError, match=r"AdaptiveHeads.* needs scores that are comparable across heads; .*KeyNorm"):
        built(OWN_POLICIES["knorm"], budget_rule="adaptive")


def test_keydiff_keeps_unusual_keys(random_prompt: Run) -> None:
    prompt = random_prompt()
    scores = built(OWN_POLICIES["keydiff"]).scorer.score(prompt.show(1)).values
    keys = prompt.keys[1][:72].transpose(0, 1)
    anchor = (keys / keys.norm(dim=-1, keepdim=True)).mean(1, keepdim=True)
    expected = -(keys * anchor).sum(-1) / (keys.norm(dim=-1) * anchor.norm(dim=-1))
    torch.testing.assert_close(scores, expected)
    assert built(OWN_POLICIES["keydiff"], budget_rule="all-layers").needs == {Signal.KEYS}


def test_random_is_reproducible_and_seeded(random_prompt: Run, kept: Run) -> None:
    prompt = random_prompt()
    first, again, other = (kept(prompt.run(built("random", seed=s), 9 * 15, protected=3)) for s in (1, 1, 2))
    assert first == again and first != other
    assert first[0] != first[1] and first[0][0] != first[0][1]


def rotation_matrix(position: int, is_neox: bool, dim: int = 8) -> Tensor:
    matrix = torch.zeros(dim, dim)
    for pair in range(dim // 2):
        a, b = (pair, pair + dim // 2) if is_neox else (2 * pair, 2 * pair + 1)
        angle = position * 100.0 ** (-pair / (dim // 2))
        matrix[a, a] = matrix[b, b] = math.cos(angle)
        matrix[a, b], matrix[b, a] = -math.sin(angle), math.sin(angle)
    return matrix


@pytest.mark.parametrize("is_neox", [True, False])
def test_rotary(is_neox: bool) -> None:
    angles = torch.arange(400)[:, None] * 100.0 ** (-torch.arange(4) / 4)
    table = Rotary(torch.cat([angles.cos(), angles.sin()], dim=-1), is_neox)
    x = torch.randn(5, 2, 8, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([0, 1, 7, 30, 399])
    turned = table.apply(x, positions)
    for i, position in enumerate(positions.tolist()):
        expected = x[i] @ rotation_matrix(position, is_neox).T
        torch.testing.assert_close(turned[i], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(table.apply(turned, positions, inverse=True), x, rtol=1e-4, atol=1e-5)


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
