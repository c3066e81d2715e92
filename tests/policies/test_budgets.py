"""How many entries each layer and head keeps: specs/ada_kv.md, and specs/d2o.md section 10."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from itertools import product

import pytest
import torch
from torch import Tensor

from helpers.dense_attention import accumulated_attention
from sgl_kvevict.errors import ConfigError
from sgl_kvevict.policies import RangeScores, build_policy
from sgl_kvevict.policies.budgets import (
    AdaptiveHeads,
    AllLayersBudget,
    DensityLayers,
    LayeredBudget,
    PyramidLayers,
    UniformHeads,
    UniformLayers,
    attention_variance,
    density_weights,
    exact_fraction,
    largest_remainder,
    mix_with_uniform,
    pyramid_schedule,
    round_shares,
    water_fill,
)
from sgl_kvevict.policies.ranking import top_mask

EX1 = [[0.30, 0.25, 0.20, 0.15, 0.10], [0.70, 0.20, 0.05, 0.03, 0.02], [0.90, 0.06, 0.02, 0.01, 0.01]]
Make = Callable[..., RangeScores]


def adaptive(safeguard: str = "none", alpha: float = 0.2) -> LayeredBudget:
    return LayeredBudget(UniformLayers(), AdaptiveHeads(safeguard, alpha))


def retained(scores: RangeScores, keep_lens: torch.Tensor) -> float:
    return float(scores.values[top_mask(scores.keys, keep_lens)].double().sum())


def test_algorithm_1_on_the_worked_example(range_scores: Make) -> None:
    """specs/ada_kv.md 9.1, 9.2: the split, the mass it retains, the bound, and brute force."""
    scores = range_scores(EX1)
    hits = adaptive().allocate(scores, 6)
    uniform = LayeredBudget(UniformLayers(), UniformHeads()).allocate(scores, 6)
    assert hits.tolist() == [[3, 2, 1]] and uniform.tolist() == [[2, 2, 2]]
    assert retained(scores, hits) == pytest.approx(2.55, abs=1e-6)
    assert retained(scores, uniform) == pytest.approx(2.41, abs=1e-6)
    assert 2 * 3 - 2 * retained(scores, hits) == pytest.approx(0.90, abs=1e-5)
    best = max(retained(scores, torch.tensor([split])) for split in product(range(6), repeat=3) if sum(split) == 6)
    assert best == pytest.approx(2.55, abs=1e-6)


def test_conservation_and_limits(range_scores: Make) -> None:
    """specs/ada_kv.md 9.3, 9.5."""
    generator = torch.Generator().manual_seed(1)
    values = torch.rand(1, 4, 9, generator=generator)
    for total in range(37):
        hits = adaptive().allocate(range_scores(values), total)
        assert int(hits.sum()) == total and int(hits.max()) <= 9
    assert adaptive().allocate(range_scores(values), 36).tolist() == [[9] * 4]
    same = values[:, :1].expand(1, 4, 9).contiguous()
    assert adaptive().allocate(range_scores(same), 12).tolist() == [[3] * 4]
    assert torch.equal(adaptive().allocate(range_scores(values), 13), adaptive().allocate(range_scores(values * 4), 13))
    louder = values.clone()
    louder[0, 2] *= 2
    before, after = (adaptive().allocate(range_scores(v), 13)[0, 2] for v in (values, louder))
    assert after >= before


def test_union_of_kept_sets_is_the_global_top_set(range_scores: Make) -> None:
    """specs/ada_kv.md 9.4."""
    scores = range_scores(torch.rand(1, 4, 9, generator=torch.Generator().manual_seed(2)))
    mask = top_mask(scores.keys, adaptive().allocate(scores, 13))
    assert torch.equal(mask.flatten(), top_mask(scores.keys.flatten(), 13))


@pytest.mark.parametrize(("safeguard", "share"), [("paper", 0.8), ("authors_code", 0.2), ("kvpress", 0.2)])
def test_safeguard_floor(range_scores: Make, safeguard: str, share: float) -> None:
    """specs/ada_kv.md 9.8: the poorest head keeps its floor of the uniform share."""
    values = torch.rand(1, 4, 50, generator=torch.Generator().manual_seed(3)) + torch.tensor([0, 5, 6, 7])[:, None]
    hits = adaptive(safeguard).allocate(range_scores(values), 80)
    assert int(hits.sum()) == 80 and int(hits.min()) >= int(share * 20)


def test_heads_permute_and_layers_are_independent(range_scores: Make) -> None:
    """specs/ada_kv.md 9.22, 9.23."""
    values = torch.rand(2, 4, 20, generator=torch.Generator().manual_seed(5))
    hits = adaptive("authors_code").allocate(range_scores(values), 48)
    order = [2, 0, 3, 1]
    assert torch.equal(
        adaptive("none").allocate(range_scores(values[:, order]), 48),
        adaptive("none").allocate(range_scores(values), 48)[:, order],
    )
    changed = values.clone()
    changed[1] = changed[1].flip(-1) ** 3
    assert torch.equal(adaptive("authors_code").allocate(range_scores(changed), 48)[0], hits[0])


def test_kvpress_safeguard_counts_pinned_tokens(range_scores: Make) -> None:
    """kvpress protects int(alpha * kept) tokens of each head, the window among them."""
    values = torch.zeros(1, 2, 30)
    values[0, 1] = 1.0
    hits = adaptive("kvpress", 0.5).allocate(range_scores(values, first=2, last=2), 12)
    assert hits.tolist() == [[1, 11]]  # int(0.5 * (6 + 4)) - 4 = 1


def test_all_layers_compete_for_one_budget(range_scores: Make) -> None:
    values = torch.rand(3, 2, 40, generator=torch.Generator().manual_seed(6))
    values[1] *= 0.01
    scores = range_scores(values)
    free = AllLayersBudget(0.0).allocate(scores, 60)
    assert int(free.sum()) == 60 and free[1].tolist() == [0, 0]
    mask = top_mask(scores.keys, free)
    assert torch.equal(mask.flatten(), top_mask(scores.keys.flatten(), 60))
    floored = AllLayersBudget(0.3).allocate(scores, 60)
    assert int(floored.sum()) == 60 and floored[1].tolist() == [3, 3]


def sums(rows: Tensor) -> Tensor:
    return accumulated_attention(rows[None], 1)[None]


def shares(values: list[float], rho: float) -> list[float]:
    weights = density_weights(torch.tensor(values, dtype=torch.float64))
    return (weights * len(values) * rho).tolist()


def test_column_sums_and_their_variance() -> None:
    """10.1."""
    rows = torch.tril(torch.ones(3, 3, dtype=torch.float64)) / torch.arange(1, 4)[:, None]  # uniform and causal
    torch.testing.assert_close(sums(rows)[0, 0].float(), torch.tensor([1.83333, 0.83333, 0.33333]), atol=1e-5, rtol=0)
    assert float(attention_variance(sums(rows), "none")) == pytest.approx(0.388889, abs=1e-6)
    assert float(sums(rows).var(-1)) == pytest.approx(0.583333, abs=1e-6)


def test_softmax_shares() -> None:
    """10.4, 10.5."""
    expected = [0.359315, 0.240856, 0.146087, 0.053742]
    for shift in (0.0, 100.0, 1000.0):
        got = shares([f + shift for f in (0.1, 0.5, 1.0, 2.0)], 0.2)
        assert got == pytest.approx(expected, abs=1e-6)
        assert sum(got) * 1000 == pytest.approx(800)
    assert shares([3.0] * 5, 0.2) == pytest.approx([0.2] * 5)
    falling = shares([0.3, 0.7, 0.9, 4.0], 0.4)
    assert falling == sorted(falling, reverse=True)


def test_caps_are_redistributed() -> None:
    """10.6."""
    weights = density_weights(torch.tensor([0.0, 1, 2, 3], dtype=torch.float64))
    assert (weights * 1.6).tolist() == pytest.approx([1.0303, 0.3790, 0.1394, 0.0513], abs=1e-4)
    assert float((weights * 1.6).clamp(max=1).sum()) == pytest.approx(1.5697, abs=1e-4)
    filled = water_fill(weights, 0.0, 1.0, 1.6)
    assert filled.tolist() == pytest.approx([1, 0.399145, 0.146837, 0.054018], abs=1e-6)


def test_floors_keep_a_degenerate_split_alive() -> None:
    """10.7: the printed formula would leave three layers nothing."""
    weights = density_weights(torch.tensor([0.0, 50, 50, 50], dtype=torch.float64))
    assert float(weights[1]) < 1e-20
    filled = water_fill(weights, 0.01, 1.0, 0.8)
    assert filled.tolist() == pytest.approx([0.77, 0.01, 0.01, 0.01])
    assert water_fill(weights, 0.01, 0.5, 0.8).tolist() == pytest.approx([0.5, 0.1, 0.1, 0.1])


def test_water_fill_meets_every_sum() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        weights = torch.rand(6, generator=generator, dtype=torch.float64) ** 8
        for total in (6 * 0.1, 0.7, 2.0, 5.9, 6.0):
            filled = water_fill(weights, 0.1, 1.0, total)
            assert float(filled.sum()) == pytest.approx(total)
            assert float(filled.min()) >= 0.1 and float(filled.max()) <= 1
            assert bool((filled[weights.argsort()].diff() >= -1e-9).all())


@pytest.mark.parametrize("norm", ["minmax", "none"])
def test_totals_are_exact_and_within_bounds(range_scores: Make, norm: str) -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.rand(5, 3, 60, generator=generator) ** torch.tensor([1, 2, 9, 20, 40])[:, None, None] * 60
    scores = range_scores(values, first=4)
    allocator = LayeredBudget(DensityLayers(norm), UniformHeads())  # type: ignore[arg-type]
    for per_head in (0, 1, 4, 11, 30, 55, 56):
        for rest in (0, 7):
            total = min(15 * per_head + rest, 15 * 56)
            lens = allocator.allocate(scores, total)
            assert int(lens.sum()) == total and int(lens.max()) <= 56
            assert int(lens.min()) >= min(4, total // 15)
            if rest == 0:
                assert bool((lens == lens[:, :1]).all())  # heads of a layer are equal


def test_density_needs_attention_sums() -> None:
    for name in ("snapkv", "random", "streaming-llm"):
        with pytest.raises(ConfigError, match="attention summed over all queries"):
            build_policy(name, {"budget_rule": "density"})
    with pytest.raises(ConfigError, match="attention summed over all queries"):
        build_policy("h2o", {"budget_rule": "density", "normalize": "queries"})
    assert build_policy("h2o", {"budget_rule": "adaptive-density"}) is not None


def released_schedule(base: int, limit: int, num_layers: int, beta: int = 20) -> list[int]:
    """The authors' code: every quantity floored, which overspends."""
    low = base // beta
    high = 2 * base - low
    if high >= limit:
        high, low = limit, 2 * base - limit
    step = (high - low) // (num_layers - 1)
    return [high - layer * step for layer in range(num_layers)]


@pytest.mark.parametrize(
    ("budget", "length", "first", "step", "last", "total"),
    [(1024, 16384, 1935, 60, 75, 32160), (128, 16384, 188, 5, 33, 3536), (1024, 1500, 1468, 30, 538, 32096)],
)
def test_schedule_is_the_released_one_without_its_overspending(budget, length, first, step, last, total):
    """specs/ada_kv.md 4.3 and 9.25."""
    released = released_schedule(budget - 32, length - 32, 32)
    assert (released[0], released[0] - released[1], released[-1]) == (first, step, last)
    assert sum(released) == total > 32 * (budget - 32)
    ours = pyramid_schedule(Fraction(budget - 32), length - 32, 32, 20)
    assert sum(ours) == 32 * (budget - 32)
    assert abs(ours[0] - first) < 1 and 0 <= ours[0] - ours[1] - step < 1


def test_layers_spend_the_budget_exactly_and_fall_with_depth(range_scores):
    scores = range_scores(torch.zeros(5, 3, 40))
    for total in (0, 7, 15 * 8, 15 * 17 + 4, 15 * 39, 15 * 40):
        totals = PyramidLayers().totals(scores, total)
        assert isinstance(totals, tuple) and sum(totals) == total
        assert list(totals) == sorted(totals, reverse=True) and min(totals) >= 0 and max(totals) <= 120
    assert PyramidLayers(beta=1).totals(scores, 75) == (15,) * 5
    assert PyramidLayers().totals(range_scores(torch.zeros(1, 3, 40)), 33) == (33,)


def test_policies(random_prompt):
    prompt = random_prompt(num_layers=5)
    for name in ("pyramidkv", "ada-pyramidkv"):
        lens = prompt.run(build_policy(name, {"window_size": 8}), 15 * 14, protected=4).selection.keep_lens
        assert lens.sum(1).tolist() == [3 * 4 + n for n in (59, 44, 30, 16, 1)]
        assert (lens[1].max() - lens[1].min() <= 1) == (name == "pyramidkv")


def mix(hits: list[int], weight: float) -> list[int]:
    tensor = torch.tensor([hits])
    return mix_with_uniform(tensor, tensor.sum(-1), exact_fraction(weight))[0].tolist()


def test_safeguard_values_of_both_readings() -> None:
    """specs/ada_kv.md 9.7."""
    hits = [250, 100, 40, 10]
    assert mix(hits, 0.2) == [130, 100, 88, 82]
    assert mix(hits, 0.8) == [220, 100, 52, 28]
    assert mix(hits, 0.0) == [100] * 4
    assert mix(hits, 1.0) == hits


def test_largest_remainder_keeps_the_sum() -> None:
    """specs/ada_kv.md 9.9."""
    assert mix([40, 10, 10, 4], 0.2) == [21, 15, 15, 13]
    assert mix([40, 10, 10, 4], 0.8) == [35, 11, 11, 7]
    assert sum(mix([2500, 1000, 400, 68], 0.8)) == 3968
    assert all(sum(mix([7, 3, 1], weight)) == 11 for weight in (0.0, 0.2, 0.37, 0.8, 1.0))


def test_decimals_are_exact() -> None:
    assert exact_fraction(0.2) == Fraction(1, 5)
    assert round_shares([Fraction(11, 3)] * 3, 11) == [4, 4, 3]
    assert round_shares([Fraction(5, 2), Fraction(5, 2), Fraction(1)], 6) == [3, 2, 1]


def test_float_shares_round_to_the_sum() -> None:
    shares = torch.tensor([[0.1 + 0.2, 1.7, 2.0 - 1e-13]], dtype=torch.float64)
    assert largest_remainder(shares, 1, torch.tensor([4])).tolist() == [[0, 2, 2]]
