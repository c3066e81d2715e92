"""Learned scores are features times weights, whatever way they are computed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers.statistics import normal
from kvevict_kernels import stored_rows
from kvevict_kernels.rotary import Rotary
from sgl_kvevict.config import KVEvictConfig
from sgl_kvevict.distill.features import NUM_WINDOW, CachedRange, cache_features, num_cache_features, window_features
from sgl_kvevict.distill.weights import LearnedScores, ScoreWeights, heads_of_rank, score_range
from sgl_kvevict.geometry import KVGeometry, KVScales
from sgl_kvevict.policies import LayerView, QueryWindow, Signal, build_policy
from sgl_kvevict.segments.packer import SegmentPacker
from sgl_kvevict.segments.prompt_observation import CacheObservation
from sgl_kvevict.segments.ranker import Compressor

LAYERS, SLOTS, HEADS, DIM = 3, 90, 2, 16


def rotary(width: int, is_neox: bool) -> Rotary:
    angles = torch.outer(torch.arange(400.0), torch.logspace(0, -3, width // 2))
    return Rotary(torch.cat([angles.cos(), angles.sin()], dim=-1), is_neox)


def tokens(dtype: torch.dtype, start: int = 7, count: int = 50) -> CachedRange:
    slots = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(2))[:count]
    k, v = (normal(seed, LAYERS, SLOTS, HEADS, DIM).to(dtype) for seed in (0, 1))
    return CachedRange(k, v, slots, start, start + count)


def in_blocks(monkeypatch: pytest.MonkeyPatch, elements: int | None) -> None:
    """Multiply by torch, so many numbers at a time; None: by compiled code, where this machine can."""
    if elements is not None:
        monkeypatch.setattr(stored_rows, "reason_not_to_run", lambda head_dim: "not installed")
        monkeypatch.setitem(stored_rows._BLOCK_ELEMENTS, "cpu", elements)


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("width", [0, 8, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("elements", [None, 1, 40, 1 << 20])
def test_scores_are_features_times_weights(monkeypatch, is_neox, width, dtype, elements):
    in_blocks(monkeypatch, elements)
    part, turned = tokens(dtype), rotary(width, is_neox)
    weights = normal(3, LAYERS, HEADS, num_cache_features(DIM))
    expected = torch.stack([cache_features(part, layer, turned) for layer in range(LAYERS)])
    expected = torch.einsum("lhnf,lhf->lhn", expected.double(), weights.double())
    torch.testing.assert_close(score_range(weights, part, turned).double(), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("goes_on", [True, False])
def test_scores_of_blocks_of_a_text_that_goes_on_do_not_depend_on_where_each_ends(goes_on):
    geometry = KVGeometry(LAYERS, HEADS, HEADS, DIM, SLOTS)
    packer = SegmentPacker(geometry, *(normal(seed, *geometry.arena_shape) for seed in (0, 1)))
    cache, window = (normal(3, LAYERS, HEADS, num_cache_features(DIM) + more) for more in (0, NUM_WINDOW))
    learned = LearnedScores(rotary(0, True), ScoreWeights(cache, window, 1))
    compressor = Compressor(KVEvictConfig(), build_policy("distilled", {}), packer, learned)
    slots, observation = torch.arange(40), CacheObservation(goes_on)
    first, later = (compressor.rank(slots, start, observation, 0).keys for start in (10, 500))
    assert torch.equal(first, later) == goes_on


@pytest.mark.parametrize("elements", [None, 1, 40, 1 << 20])
def test_latents_have_one_row_for_key_and_value(monkeypatch, elements):
    """Scores are features times weights; only the last columns of a row were rotated, and none counts twice."""
    in_blocks(monkeypatch, elements)
    part, turned = tokens(torch.float32), replace(rotary(4, False), start=12)
    part = replace(part, v_arena=part.k_arena[..., :12])
    assert part.is_latent
    features = torch.stack([cache_features(part, layer, turned) for layer in range(LAYERS)])
    assert features.shape == (LAYERS, HEADS, 50, num_cache_features(DIM, is_latent=True)) == (LAYERS, HEADS, 50, 20)
    rows = part.k_arena[:, part.token_slots].transpose(1, 2)
    torch.testing.assert_close(features[..., :12], rows[..., :12])
    torch.testing.assert_close(features[..., 17], rows[..., :12].norm(dim=-1).log())
    weights = normal(3, LAYERS, HEADS, 20)
    expected = torch.einsum("lhnf,lhf->lhn", features.double(), weights.double())
    torch.testing.assert_close(score_range(weights, part, turned).double(), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("is_neox", [True, False])
def test_only_the_columns_from_the_start_on_are_rotated(is_neox):
    turned, positions, x = rotary(6, is_neox), torch.tensor([3, 0, 21]), normal(5, 3, HEADS, DIM)
    later = replace(turned, start=7)
    got = later.apply(x, positions)
    assert torch.equal(got[..., :7], x[..., :7]) and torch.equal(got[..., 13:], x[..., 13:])
    assert torch.equal(got[..., 7:13], turned.apply(x[..., 7:13], positions))
    torch.testing.assert_close(later.apply(got, positions, inverse=True), x)
    each = torch.stack([later.apply(x[:1], position[None])[0] for position in positions])
    torch.testing.assert_close(later.turn_of(positions, DIM).apply(x[:1]), each)


def test_float8_counts_as_what_it_stands_for(monkeypatch):
    """Features and scores are those of the numbers themselves, in each layer by its own scale."""
    in_blocks(monkeypatch, 40)
    scales = KVScales(k=(0.5, 3.0, 0.7), v=(1.5, 0.2, 1.0))
    plain = tokens(torch.float8_e4m3fn)
    stored = replace(plain, scales=scales)
    k, v = (
        arena.float() * torch.tensor(scale).view(LAYERS, 1, 1, 1)
        for arena, scale in ((plain.k_arena, scales.k), (plain.v_arena, scales.v))
    )
    meant, turned = replace(plain, k_arena=k, v_arena=v), rotary(16, True)
    for layer in range(LAYERS):
        torch.testing.assert_close(cache_features(stored, layer, turned), cache_features(meant, layer, turned))
    weights = normal(3, LAYERS, HEADS, num_cache_features(DIM))
    torch.testing.assert_close(score_range(weights, stored, turned), score_range(weights, meant, turned))
    assert stored.sample(4, 10).scales is scales


def test_keys_count_as_they_were_before_their_rotation():
    """The same content at other positions has the same features, but for the position itself."""
    turned = rotary(16, True)
    plain = normal(4, 20, HEADS, DIM)
    found = []
    for start in (0, 100):
        keys = turned.apply(plain, torch.arange(start, start + 20))
        part = CachedRange(keys[None], keys[None], torch.arange(20), start, 200)
        found.append(cache_features(part, 0, turned)[..., :DIM])
    torch.testing.assert_close(found[0], found[1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found[0].transpose(0, 1), plain, atol=1e-4, rtol=1e-4)


def test_window_attention_adds_its_part():
    part, turned = tokens(torch.float32), rotary(16, True)
    cache, both = (normal(seed, LAYERS, HEADS, num_cache_features(DIM) + extra) for seed, extra in ((5, 0), (6, 2)))
    weights = ScoreWeights(cache, both, num_prefixes=1)
    window = normal(7, LAYERS, HEADS, 50, NUM_WINDOW)
    expected = score_range(both[..., :-NUM_WINDOW].contiguous(), part, turned)
    expected = expected + torch.einsum("lhnf,lhf->lhn", window, both[..., -NUM_WINDOW:])
    torch.testing.assert_close(score_range(weights.window, part, turned, window), expected, atol=1e-4, rtol=1e-4)


def test_window_features_are_logarithms_of_attention():
    part = tokens(torch.float32, start=0)
    window = QueryWindow(normal(8, 4, 2 * HEADS, DIM), normal(9, 4, 2 * HEADS) + 6, 60)
    shown = LayerView(1, 0, part.k_arena[1], part.v_arena[1], part.token_slots, 0.25)
    features = window_features(shown.with_signals({Signal.WINDOW_QUERIES: window}))
    assert features is not None and features.shape == (HEADS, 50, NUM_WINDOW)
    keys = part.k_arena[1, part.token_slots].repeat_interleave(2, dim=1)
    attention = (torch.einsum("whd,nhd->whn", window.queries, keys) * 0.25 - window.lse[..., None]).exp()
    mean = attention.view(4, HEADS, 2, 50).mean(dim=(0, 2))
    torch.testing.assert_close(features[..., 1], (mean + 1e-4).log(), atol=1e-4, rtol=1e-4)
    assert (features[..., 0] >= features[..., 1] - 1e-6).all()
    assert window_features(shown) is None


def test_a_rank_has_its_own_heads():
    whole = torch.arange(4.0).view(1, 4, 1)
    assert [heads_of_rank(whole, rank, 2, 2).flatten().tolist() for rank in range(2)] == [[0, 1], [2, 3]]
    copies = [heads_of_rank(whole, rank, 8, 1).flatten().tolist() for rank in range(8)]
    assert copies == [[0], [0], [1], [1], [2], [2], [3], [3]]


def test_keys_of_images_count_as_they_were_before_their_rotation():
    """Time, height and width turn pairs of their own: features and scores are those of the keys before RoPE."""
    turned = replace(rotary(8, True), axis_of=torch.tensor([0, 1, 2, 1]))
    places = torch.randint(0, 300, (3, SLOTS), generator=torch.Generator().manual_seed(5))
    plain = replace(tokens(torch.float32), slot_positions=places.int())
    by_axis = torch.stack([turned.cos_sin[place] for place in places])  # [axis, slot, column]
    cos, sin = (
        torch.stack([by_axis[axis, :, column + half] for column, axis in enumerate((0, 1, 2, 1))], 1) for half in (0, 4)
    )
    first, second = plain.k_arena[..., :4], plain.k_arena[..., 4:8]
    cos, sin = cos[:, None], sin[:, None]
    keys = torch.cat([first * cos - second * sin, second * cos + first * sin, plain.k_arena[..., 8:]], dim=-1)
    stored = replace(plain, k_arena=keys)
    none = replace(plain, slot_positions=None)
    weights = normal(3, LAYERS, HEADS, num_cache_features(DIM))
    for layer in range(LAYERS):
        expected = cache_features(none, layer, rotary(0, True))
        torch.testing.assert_close(cache_features(stored, layer, turned), expected, atol=1e-4, rtol=1e-4)
    scores = score_range(weights, none, rotary(0, True))
    torch.testing.assert_close(score_range(weights, stored, turned), scores, atol=1e-3, rtol=1e-4)
    sample = stored.sample(4, 10)
    assert torch.equal(sample.rotary_positions, places[:, sample.token_slots])


def test_wrong_weights_are_refused():
    with pytest.raises(ValueError, match="weights: expected"):
        score_range(torch.zeros(LAYERS, HEADS, 7), tokens(torch.float32), rotary(16, True))


def test_a_sample_is_spread_over_the_range_and_leaves_the_sinks_out():
    part = tokens(torch.float32, start=2)
    sample = part.sample(first=4, most=10)
    assert sample.positions.tolist() == list(range(4, 52, 5))
    assert torch.equal(sample.token_slots, part.token_slots[sample.positions - 2])
    whole = part.sample(first=0, most=100)
    assert torch.equal(whole.token_slots, part.token_slots) and whole.positions.tolist() == list(range(2, 52))
