"""specs/kvec.md section 9."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from helpers.decisions import Run, built, of_paper
from sgl_kvevict.errors import ConfigError

Array = NDArray[np.float64]

FIXTURE = np.array(
    [
        [[0.30, 0.10, 0.15, 0.10, 0.10, 0.15, 0.10, 0], [0.40, 0.05, 0.10, 0.05, 0.20, 0.05, 0.05, 0.10]],
        [[0.01, 0.02, 0.03, 0.30, 0.04, 0.25, 0.35, 0], [0.15, 0.12, 0.13, 0.11, 0.14, 0.12, 0.11, 0.12]],
    ]
)
SMALL = {"base_window": 1, "extended_window": 2, "rescored_share": 0.5, "protected_share": 0.5}


def prompt_of(from_weights: Run, layers: list[Array], tail: int = 0) -> Any:
    return from_weights([torch.from_numpy(rows) for rows in layers], tail=tail)


def best(values: Array, count: int) -> list[int]:
    return np.argsort(-np.asarray(values), kind="stable")[:count].tolist()


def oracle_layer(
    rows: Array, times_kept: Array, layer: int, budget: int, base: int = 16, longer: int = 32, delta: int = 3,
    bonus: float = 1.0, share: float = 0.25, literal: bool = True,
) -> list[list[int]]:  # fmt: skip
    """One layer of Algorithm 1 in numpy; updates ``times_kept``."""
    num_heads, num_rows, length = rows.shape
    cand, net = (length, budget) if literal else (length - base, budget - base)
    scores = rows[:, -base:, :cand].mean(1)
    flattest = np.argsort(rows[:, -base:].mean(1).std(1), kind="stable")[:delta]
    scores[flattest] = rows[flattest][:, -min(longer, num_rows) :, :cand].mean(1)
    importance = rows[:, -base:, :cand].max(0).mean(0)
    total = scores + bonus * importance * (1 - times_kept[:cand] / (layer + 1))
    kept = []
    for head in range(num_heads):
        total[head, best(scores[head], min(int(share * budget), net))] = np.inf
        window = [] if literal else list(range(cand, length))
        kept.append(sorted(best(total[head], net)) + window)
    times_kept[sorted(set().union(*map(set, kept)))] += 1
    return kept


def oracle(layers: list[Array], budget: int, **options: Any) -> list[list[list[int]]]:
    times_kept = np.zeros(layers[0].shape[-1])
    return [oracle_layer(rows, times_kept, i, budget, **options) for i, rows in enumerate(layers)]


def coverage(kept: list[list[list[int]]]) -> int:
    return len({token for layer in kept for head in layer for token in head})


@pytest.mark.parametrize(
    ("options", "expected", "covered"),
    [
        ({}, [[[0, 4], [0, 6]], [[0, 4], [3, 6]]], 4),
        ({"rescored_share": 0.0, "bonus": 0.0}, [[[0, 4], [0, 4]], [[0, 4], [0, 4]]], 2),
        ({"rescored_share": 0.0}, [[[0, 4], [0, 4]], [[0, 4], [0, 2]]], 3),
        ({"bonus": 0.0}, [[[0, 4], [3, 6]], [[0, 4], [3, 6]]], 4),
        ({"bonus": 2.0}, [[[0, 4], [0, 6]], [[0, 4], [0, 6]]], 3),
        ({"protected_share": 0.0}, [[[0, 4], [0, 6]], [[0, 4], [3, 5]]], 5),
        ({"protected_share": 1.0}, [[[0, 4], [3, 6]], [[0, 4], [3, 6]]], 4),
        ({"extended_window": 1}, [[[0, 4], [0, 4]], [[0, 4], [0, 2]]], 3),
    ],
)
def test_readings_told_apart(from_weights, kept, options, expected, covered):
    """T2 (and T3: what switches a module off)."""
    prompt = prompt_of(from_weights, [FIXTURE] * 2)
    got = kept(prompt.run(built("k-vec", keep_window=False, **{**SMALL, **options}), 2 * 2 * 2))
    assert got == expected and coverage(got) == covered


def test_three_layers_by_hand(from_weights, kept):
    """T1."""
    prompt = prompt_of(from_weights, [FIXTURE] * 3)
    policy = built("k-vec", keep_window=False, **SMALL)
    scores = policy.scorer.score(prompt.show(0))
    torch.testing.assert_close(
        scores.values[1], torch.tensor([0.08, 0.07, 0.08, 0.205, 0.09, 0.185, 0.23, 0.06]), rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(
        scores.importance, torch.tensor([0.40, 0.12, 0.13, 0.11, 0.20, 0.12, 0.11, 0.12]), rtol=1e-5, atol=1e-6
    )
    got = kept(prompt.run(policy, 3 * 2 * 2))
    assert got == [[[0, 4], [0, 6]], [[0, 4], [3, 6]], [[0, 4], [5, 6]]] and coverage(got) == 5


def test_window_inside_the_range_or_behind_it(from_weights, kept):
    """T2, SnapKV mode with B = 3: the last token is kept, the others compete."""
    behind = prompt_of(from_weights, [FIXTURE] * 2, tail=1)
    golden = [[[0, 4], [0, 6]], [[0, 4], [3, 6]]]
    assert kept(behind.run(of_paper("k-vec", kernel_size=1, **SMALL), 2 * 2 * 2)) == golden
    prompt = prompt_of(from_weights, [FIXTURE] * 2)
    got = kept(prompt.run(built("k-vec", **SMALL), 2 * 2 * 3))
    assert got == [[[*head, 7] for head in layer] for layer in golden] and coverage(got) == 5
    plain = kept(prompt.run(built("k-vec", **{**SMALL, "rescored_share": 0.0, "bonus": 0.0}), 2 * 2 * 3))
    assert coverage(plain) == 3


def test_protected_tokens_come_first_whatever_the_bonus(from_weights, kept):
    """T5: with the printed override of 1.0 head 0 would keep {3, 4}."""
    rows = np.array([[0.30, 0.25, 0.20, 0.15, 0.10], [0.01, 0.01, 0.01, 0.96, 0.01], [0.01, 0.01, 0.01, 0.01, 0.96]])
    prompt = prompt_of(from_weights, [rows[:, None]])
    options = {"base_window": 1, "extended_window": 1, "rescored_share": 0.0, "protected_share": 0.5}
    assert kept(prompt.run(built("k-vec", keep_window=False, **options), 6)) == [[[0, 3], [3, 4], [3, 4]]]


def synth(seed: int) -> list[Array]:
    """As T10: 8 layers of 8 heads, 32 rows, 256 tokens, with what is common to all, to a layer and to a head."""
    rng = np.random.default_rng(seed)
    common = 3 * np.arange(256) / 256 + rng.standard_normal(256) + 0.2 * rng.standard_normal((8, 1, 1, 256))
    scales = rng.uniform(0.5, 1.5, (8, 8, 1, 1))
    logits = scales * (common + 0.3 * rng.standard_normal((8, 8, 1, 256)))
    logits = logits + 0.5 * rng.standard_normal((8, 8, 32, 256))
    logits[:, :, :16] += 0.5 * rng.standard_normal(256)  # the earlier half of the rows
    logits[..., np.arange(256) > np.arange(224, 256)[:, None]] = -np.inf
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return [*(weights / weights.sum(-1, keepdims=True))]


@pytest.mark.parametrize("literal", [True, False])
def test_equals_the_oracle(from_weights, kept, literal):
    layers = synth(3)
    got = kept(prompt_of(from_weights, layers).run(built("k-vec", keep_window=not literal), 8 * 8 * 40))
    assert got == oracle(layers, 40, literal=literal)
    assert all(len(run) == 40 for layer in got for run in layer)  # T6


def test_order_matters_for_layers_not_for_heads(from_weights, kept):
    """T9."""
    layers = synth(4)[:3]
    policy = built("k-vec", keep_window=False)
    got = kept(prompt_of(from_weights, layers).run(policy, 3 * 8 * 32))
    permuted = kept(prompt_of(from_weights, [rows[::-1].copy() for rows in layers]).run(policy, 3 * 8 * 32))
    assert [layer[::-1] for layer in permuted] == got
    swapped = kept(prompt_of(from_weights, layers[::-1]).run(policy, 3 * 8 * 32))
    assert swapped[::-1] != got
    assert kept(prompt_of(from_weights, layers).run(policy, 3 * 8 * 32)) == got  # nothing is left behind


def test_query_heads_are_grouped_first(make_prompt):
    """T8: importance is the maximum over KV heads of the group means, the spread that of the group means."""
    weights = torch.tensor([[0.6, 0.2, 0.1, 0.1], [0, 0.2, 0.4, 0.4], [0.25] * 4, [0.1, 0.1, 0.1, 0.7]])
    keys = torch.eye(4)[:, None].expand(4, 2, 4).contiguous()
    queries = weights.clamp(min=1e-30).log()[None] * 2
    prompt = make_prompt([keys], [queries], tail=0, window=1)
    options = {"base_window": 1, "extended_window": 1, "rescored_share": 0.5, "keep_window": False}
    scores = built("k-vec", **options).scorer.score(prompt.show(0))
    torch.testing.assert_close(
        scores.values, torch.tensor([[0.3, 0.2, 0.25, 0.25], [0.175, 0.175, 0.175, 0.475]]), rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(scores.importance, torch.tensor([0.3, 0.2, 0.25, 0.475]), rtol=1e-5, atol=1e-6)
    assert scores.values.std(-1, correction=0).tolist() == pytest.approx([0.03536, 0.12990], abs=1e-5)


def test_extended_window_must_extend():
    with pytest.raises(ConfigError, match="extended_window: got 8 for policy 'k-vec'; allowed: an integer >= base"):
        built("k-vec", extended_window=8)


def test_the_protected_share_is_of_the_whole_budget(from_weights, kept):
    """Eq. 16: beta * B counts the window: of B = 4 with a window of 1 two tokens are sure, not one."""
    prompt = prompt_of(from_weights, [FIXTURE] * 2, tail=1)
    options = {"base_window": 1, "extended_window": 1, "rescored_share": 0.0, "kernel_size": 1, "bonus": 50.0}
    half = kept(prompt.run(of_paper("k-vec", protected_share=0.5, **options), 2 * 2 * 3))
    assert all({0, 4} <= set(head) for layer in half for head in layer)  # both heads' own best
    none = kept(prompt.run(of_paper("k-vec", protected_share=0.0, **options), 2 * 2 * 3))
    assert any(4 not in head for layer in none for head in layer)


def test_the_spread_counts_the_tokens_behind_the_range(from_weights):
    """Eq. 10: the standard deviation over all tokens. Head 1 is flat in the range and peaks behind it."""
    rows = torch.tensor([[[0.30, 0.20, 0.30, 0.20, 0.0]], [[0.05, 0.05, 0.05, 0.05, 0.80]]], dtype=torch.float64)
    rows = torch.cat((rows[:, :, [1, 0, 3, 2, 4]], rows), dim=1)
    rows[:, 0, 4] = 0.0
    rows[:, 0] /= rows[:, 0].sum(-1, keepdim=True)
    options = {"base_window": 1, "extended_window": 2, "rescored_share": 0.5, "kernel_size": 1}
    scores = of_paper("k-vec", **options).scorer.score(from_weights([rows], tail=1).show(0)).values
    torch.testing.assert_close(scores[1], rows[1, 1, :4].float(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(scores[0], rows[0, :, :4].mean(0).float(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("num_heads", "rescored"), [(1, 0), (2, 1), (3, 1), (4, 2), (8, 3), (16, 6), (32, 12)])
def test_three_of_eight_heads_are_rescored(num_heads, rescored):
    assert of_paper("k-vec").scorer.num_rescored(num_heads) == rescored  # type: ignore[attr-defined]


def test_what_is_left_without_effect_is_said():
    policy = of_paper("k-vec")
    assert policy.scorer.caution(3) is None and policy.scorer.caution(8) is None
    assert "of 1 KV heads is 0: no head looks further back" in str(policy.scorer.caution(1))
    every = of_paper("k-vec", rescored_share=1.0)
    assert "of 8 KV heads is 8: every head looks further back" in str(every.scorer.caution(8))
    assert of_paper("k-vec", rescored_share=0.0).scorer.caution(1) is None  # switched off
    assert of_paper("snapkv").scorer.caution(1) is None
