"""specs/d2o.md section 10, layer budgets."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from helpers.dense_attention import accumulated_attention
from sgl_kvevict.errors import ConfigError
from sgl_kvevict.policies import RangeScores, build_policy
from sgl_kvevict.policies.budgets import (
    DensityLayers,
    LayeredBudget,
    UniformHeads,
    attention_variance,
    density_weights,
    water_fill,
)

Make = Callable[..., RangeScores]


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
