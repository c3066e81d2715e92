"""Statistics of keys and values: sums over texts, constant channels, and the heads of ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvevict_kernels.checks import FP8
from kvevict_kernels.rotary import Rotary
from sgl_kvevict.distill.features import CachedRange
from sgl_kvevict.distill.learner import NUM_SINKS
from sgl_kvevict.distill.row_sums import MIN_SHARE, SPREAD_POSITIONS, RowSums
from sgl_kvevict.geometry import KVGeometry, KVScales

LAYERS, SLOTS, HEADS, DIM = 3, 50, 4, 8
GEOMETRY = KVGeometry(LAYERS, HEADS, HEADS, DIM, SLOTS)
STILL = Rotary(torch.empty(100, 0), is_neox=True)


def arena(seed: int) -> Tensor:
    """Keys or values whose channels differ much in mean and deviation."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.rand(LAYERS, 1, HEADS, DIM, generator=generator) * 9 + 0.1
    mean = torch.randn(LAYERS, 1, HEADS, DIM, generator=generator) * 100
    return mean + spread * torch.randn(LAYERS, SLOTS, HEADS, DIM, generator=generator)


def tokens(*slots: int, start: int = NUM_SINKS) -> CachedRange:
    """Tokens of a path, without its first ones."""
    return CachedRange(arena(0), arena(1), torch.tensor(slots), start, start + len(slots))


def test_they_are_those_of_all_tokens_of_all_texts() -> None:
    sums = RowSums(GEOMETRY, STILL)
    sums.add(tokens(3, 1, 4, 15, 9))
    sums.add(tokens(2, 6, 5))
    found = sums.solve()
    slots = torch.tensor([3, 1, 4, 15, 9, 2, 6, 5])
    for rows, mean, deviation in ((arena(0), found.k_mean, found.k_scale), (arena(1), found.v_mean, found.v_scale)):
        torch.testing.assert_close(mean, rows[:, slots].mean(1))
        torch.testing.assert_close(deviation, rows[:, slots].std(1, correction=0), rtol=1e-3, atol=1e-3)


def test_attention_sinks_are_left_out() -> None:
    with_them, without = RowSums(GEOMETRY, STILL), RowSums(GEOMETRY, STILL)
    with_them.add(tokens(*range(20), start=0))
    without.add(tokens(*range(NUM_SINKS, 20)))
    with_them.add(tokens(7, 8, start=1))  # a text of sinks alone
    assert torch.equal(with_them.solve().k_mean, without.solve().k_mean)


def test_keys_count_at_positions_that_texts_do_not_reach() -> None:
    angles = torch.outer(torch.arange(40_000.0), torch.logspace(0, -4, DIM // 2))
    rotary = Rotary(torch.cat([angles.cos(), angles.sin()], dim=-1), is_neox=True)
    unturned = torch.full((LAYERS, SLOTS, HEADS, DIM), 10.0) + torch.randn(LAYERS, SLOTS, HEADS, DIM) / 10
    keys = rotary.apply(unturned[0], torch.arange(SLOTS))
    sums = RowSums(GEOMETRY, rotary)
    sums.add(replace(tokens(*range(NUM_SINKS, SLOTS)), k_arena=keys.expand(LAYERS, -1, -1, -1)))
    found, last = sums.solve(), DIM // 2 - 1
    assert SPREAD_POSITIONS < 40_000
    far = rotary.apply(unturned[0, :1], torch.tensor([30_000]))[0]
    numbers = (far - found.k_mean[0]) / found.k_scale[0]
    assert numbers.abs().max() < 2.5
    assert found.k_scale[0, :, last].min() > 3  # the slowest pair has turned, which no text shows
    assert keys[:, :, last].std(0).max() < 0.5


def test_a_channel_that_never_varied_gets_a_deviation() -> None:
    text = tokens(*range(20))
    text.k_arena[0, :, 1, 2] = 7.0
    text.k_arena[1] = 3.0
    sums = RowSums(GEOMETRY, STILL)
    sums.add(text)
    found = sums.solve()
    others = text.k_arena[0, NUM_SINKS:20, 1].std(0, correction=0).mean()
    assert found.k_scale[0, 1, 2] == pytest.approx(float(MIN_SHARE * others), rel=0.1)
    assert found.k_mean[0, 1, 2] == 7.0 and (found.k_scale > 0).all()


def recorded(sums: RowSums, layer: int, queries: Tensor) -> None:
    """Queries of one layer, [n, num_qo_heads, DIM], as a forward shows them."""
    sums.record(layer, queries, queries, queries, 1.0)


def test_keys_are_scaled_so_that_queries_see_least_noise() -> None:
    sizes = torch.tensor([0.2, 1.0, 5.0, 1.0, 1.0, 3.0, 1.0, 0.5])
    queries = sizes * torch.randn(400, 2 * HEADS, DIM, generator=torch.Generator().manual_seed(5))
    sums = RowSums(GEOMETRY, STILL)
    recorded(sums, 1, queries)
    sums.add(tokens(*range(NUM_SINKS, SLOTS)))
    found = sums.solve()
    deviation = arena(0)[:, NUM_SINKS:SLOTS].std(1, correction=0)
    rms = queries.square().view(400, HEADS, 2, DIM).mean((0, 2)).sqrt()

    def noise(scale: Tensor) -> Tensor:
        """What queries see of a noise that is in proportion to a row's length."""
        seen = (rms * scale).square().sum(-1)
        return seen * (deviation[1] / scale).square().sum(-1)

    least = noise(found.k_scale[1])
    assert (least < 0.8 * noise(deviation[1])).all()  # what rows scaled by their deviation have
    for channel in range(DIM):
        for factor in (0.8, 1.25):
            other = found.k_scale[1].clone()
            other[:, channel] *= factor
            assert (noise(other) > least).all()
    torch.testing.assert_close(
        (deviation[1] / found.k_scale[1]).square().mean(-1), torch.ones(HEADS), rtol=1e-3, atol=1e-3
    )


def test_rows_of_a_float8_pool_count_with_their_scale() -> None:
    text = tokens(*range(30))
    stored = (text.k_arena / 4).to(FP8)
    sums = RowSums(GEOMETRY, STILL)
    scales = KVScales((4.0,) * LAYERS, (1.0,) * LAYERS)
    sums.add(replace(text, k_arena=stored, v_arena=text.v_arena.to(FP8), scales=scales))
    torch.testing.assert_close(sums.solve().k_mean, stored.float().mul(4)[:, :30].mean(1))
