from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expected_attention import mean_rotation
from torch import Tensor

from helpers.own_policies import OWN_POLICIES
from sgl_kvevict.errors import ConfigError
from sgl_kvevict.policies import LayerView, Policy, QueryMoments, Rotary, Signal, build_policy

Run = Callable[..., Any]


def policy(name: str, **options: Any) -> Policy:
    built = build_policy(OWN_POLICIES.get(name, name), options)
    assert built is not None
    return built


def test_knorm_keeps_small_keys(random_prompt: Run, kept: Run) -> None:
    prompt = random_prompt()
    for layer, runs in enumerate(kept(prompt.run(policy("knorm"), 9 * 15))):
        norms = prompt.keys[layer][:72].norm(dim=-1)
        for head, run in enumerate(runs):
            assert run == sorted(norms[:, head].argsort(stable=True)[:15].tolist())
    with pytest.raises(ConfigError, match="comparable across heads; those of KeyNormScorer are not"):
        policy("knorm", budget_rule="adaptive")


def test_keydiff_keeps_unusual_keys(random_prompt: Run) -> None:
    prompt = random_prompt()
    scores = policy("keydiff").scorer.score(prompt.show(1)).values
    keys = prompt.keys[1][:72].transpose(0, 1)
    anchor = (keys / keys.norm(dim=-1, keepdim=True)).mean(1, keepdim=True)
    expected = -(keys * anchor).sum(-1) / (keys.norm(dim=-1) * anchor.norm(dim=-1))
    torch.testing.assert_close(scores, expected)
    assert policy("keydiff", budget_rule="all-layers").needs == {Signal.KEYS}


def test_random_is_reproducible_and_seeded(random_prompt: Run, kept: Run) -> None:
    prompt = random_prompt()
    first, again, other = (kept(prompt.run(policy("random", seed=s), 9 * 15, protected=3)) for s in (1, 1, 2))
    assert first == again and first != other
    assert first[0] != first[1] and first[0][0] != first[0][1]


def rotary(is_neox: bool = True, dim: int = 8, positions: int = 400) -> Rotary:
    frequencies = 100.0 ** (-torch.arange(dim // 2) / (dim // 2))
    angles = torch.arange(positions)[:, None] * frequencies
    return Rotary(torch.cat([angles.cos(), angles.sin()], dim=-1), is_neox)


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
    table = rotary(is_neox)
    x = torch.randn(5, 2, 8, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([0, 1, 7, 30, 399])
    turned = table.apply(x, positions)
    for i, position in enumerate(positions.tolist()):
        expected = x[i] @ rotation_matrix(position, is_neox).T
        torch.testing.assert_close(turned[i], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(table.apply(turned, positions, inverse=True), x, rtol=1e-4, atol=1e-5)
    mean = mean_rotation(table, 50, 20, 8)
    expected = torch.stack([rotation_matrix(p, is_neox) for p in range(50, 70)]).mean(0)
    torch.testing.assert_close(mean, expected, rtol=1e-4, atol=1e-5)


def test_rotary_leaves_other_dimensions_alone() -> None:
    x = torch.randn(3, 1, 10, generator=torch.Generator().manual_seed(1))
    turned = rotary().apply(x, torch.tensor([4, 5, 6]))
    assert torch.equal(turned[..., 8:], x[..., 8:]) and not torch.allclose(turned[..., :8], x[..., :8])
    assert mean_rotation(rotary(), 3, 4, 10)[9, 9] == 1


def test_rotary_table_ends() -> None:
    table = rotary(positions=20)
    torch.testing.assert_close(mean_rotation(table, 15, 100, 8), mean_rotation(table, 15, 5, 8))
    torch.testing.assert_close(mean_rotation(table, 30, 5, 8), mean_rotation(table, 19, 1, 8))


@pytest.mark.parametrize("block", [1, 4, 512])
def test_moments_add_up_over_chunks(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr("sgl_kvevict.policies.signals.QUERIES_PER_BLOCK", block)
    table = rotary()
    plain = torch.randn(30, 4, 8, generator=torch.Generator().manual_seed(2))
    turned = table.apply(plain, torch.arange(30))
    moments = QueryMoments.empty(4, 8, table)
    for begin, end in ((0, 3), (3, 9), (9, 30)):
        moments = moments.add(turned[begin:end], begin)
    assert moments.count == 26  # the first four queries are outliers and left out
    torch.testing.assert_close(moments.mean, plain[4:].mean(0), rtol=1e-4, atol=1e-5)
    centred = (plain[4:] - plain[4:].mean(0)).permute(1, 2, 0)
    torch.testing.assert_close(moments.covariance, centred @ centred.transpose(1, 2) / 26, rtol=1e-3, atol=1e-4)


def expected_scores(view: LayerView, plain: Tensor, is_neox: bool, values: Tensor) -> Tensor:
    """Expected Attention head by head, with explicit matrices."""
    assert view.num_prompt_tokens is not None
    length, keys = view.num_prompt_tokens, view.keys
    turn = torch.stack([rotation_matrix(p, is_neox) for p in range(length, length + 16)]).mean(0)
    scores = torch.zeros(keys.shape[1], keys.shape[0])
    group = plain.shape[1] // keys.shape[1]
    for head in range(plain.shape[1]):
        sample = plain[4:, head]
        mean = turn @ sample.mean(0)
        spread = turn @ torch.cov(sample.T, correction=0) @ turn.T
        k = keys[4:, head // group]
        logits = k @ mean / math.sqrt(8) + torch.einsum("nd,de,ne->n", k, spread, k) / 16
        scores[head // group, 4:] += logits.softmax(-1) / group
    return scores * values.norm(dim=-1).T


@pytest.mark.parametrize("is_neox", [True, False])
def test_expected_attention(random_prompt: Run, kept: Run, is_neox: bool) -> None:
    prompt = random_prompt(num_layers=1)
    plain = 0.5 * torch.randn(80, 6, 8, generator=torch.Generator().manual_seed(3))
    table = rotary(is_neox)
    moments = QueryMoments.empty(6, 8, table).add(table.apply(plain, torch.arange(80)), 0)
    view = prompt.show(0).with_signals({Signal.QUERY_MOMENTS: moments})
    chosen = policy("expected-attention", num_future_positions=16)
    scores = chosen.scorer.score(view).values
    expected = expected_scores(view, plain, is_neox, prompt.values[0][:72])
    torch.testing.assert_close(scores, expected, rtol=1e-3, atol=1e-5)
    decision = chosen.select(lambda _: view, prompt.geometry, 3 * 20, 0)
    for head, run in enumerate(kept(decision)[0]):
        best = sorted(range(4, 72), key=lambda i, head=head: (-float(scores[head, i]), i))[:16]
        assert run == [0, 1, 2, 3, *sorted(best)]


def test_expected_attention_options(random_prompt: Run) -> None:
    assert policy("expected-attention").needs == {Signal.QUERY_MOMENTS, Signal.KEYS, Signal.VALUES}
    assert policy("expected-attention", use_value_norm=False).needs == {Signal.QUERY_MOMENTS, Signal.KEYS}
    with pytest.raises(ValueError, match="needs query_moments of layer 0"):
        random_prompt().run(policy("expected-attention"), 9 * 20)


def test_expected_attention_of_a_later_range_has_no_sinks(random_prompt: Run) -> None:
    prompt = random_prompt(num_layers=1, start=20)
    moments = QueryMoments.empty(6, 8, rotary()).add(prompt.queries[0], 0)
    view = prompt.show(0).with_signals({Signal.QUERY_MOMENTS: moments})
    scores = policy("expected-attention").scorer.score(view).values
    assert bool((scores > 0).all())
