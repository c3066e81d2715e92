"""Learning from scored texts: sums of products, recall on texts not learned from, and weights of ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from helpers.statistics import normal
from kvevict_kernels.rotary import Rotary
from sgl_kvevict.distill.features import NUM_WINDOW, CachedRange, cache_features, num_cache_features, window_features
from sgl_kvevict.distill.learner import (
    RIDGE,
    SAMPLED_TOKENS,
    SCORE_FLOOR,
    RidgeStatistics,
    ScoredText,
    ScoreLearner,
    top_recall,
)
from sgl_kvevict.distill.weights import heads_of_rank, of_all_heads, score_range
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.policies import LayerView, QueryWindow, Signal

LAYERS, HEADS, DIM = 2, 2, 8
GEOMETRY = KVGeometry(LAYERS, 2 * HEADS, HEADS, DIM, 4000)
ROTARY = Rotary(torch.cat([torch.ones(4000, 2), torch.zeros(4000, 2)], dim=-1), True)


class Prefix:
    """Random keys and values, with scores that follow from them, or with ones that follow from nothing."""

    def __init__(self, seed: int, num_tokens: int = 150, *, noise: bool = False) -> None:
        k, v = (normal(seed * 10 + i, LAYERS, num_tokens, HEADS, DIM) for i in range(2))
        self.tokens = CachedRange(k, v, torch.arange(num_tokens), 0, num_tokens)
        self.window = QueryWindow(normal(seed * 10 + 2, 4, 2 * HEADS, DIM), torch.full((4, 2 * HEADS), 5.0), num_tokens)
        features = torch.stack([self.features(layer) for layer in range(LAYERS)])
        secret = normal(99, LAYERS, HEADS, features.shape[-1]) * 0.3
        logs = normal(seed * 10 + 3, *features.shape[:3]) if noise else torch.einsum("lhnf,lhf->lhn", features, secret)
        self.scores = (logs.exp() - SCORE_FLOOR).clamp_min(0)

    def features(self, layer: int) -> Tensor:
        window = window_features(self.show(layer))
        assert window is not None
        return torch.cat([cache_features(self.tokens, layer, ROTARY), window], dim=-1)

    def show(self, layer: int) -> LayerView:
        k, v = self.tokens.k_arena[layer], self.tokens.v_arena[layer]
        return LayerView(layer, 0, k, v, self.tokens.token_slots, DIM**-0.5, {Signal.WINDOW_QUERIES: self.window})

    @property
    def text(self) -> ScoredText:
        return ScoredText(self.tokens, self.scores, self.show)


def learner_of(*prefixes: Prefix, geometry: KVGeometry = GEOMETRY) -> ScoreLearner:
    learner = ScoreLearner(geometry, ROTARY)
    for prefix in prefixes:
        learner.add(prefix.text)
    return learner


def test_sums_of_products_give_the_regression_on_all_tokens_at_once() -> None:
    parts = [normal(seed, 1, 40, 6) * torch.tensor([1.0, 30, 0.1, 1, 1, 1]) for seed in range(3)]
    for part in parts:
        part[..., 5] = 1
    targets = [part @ normal(7, 6) + 3 for part in parts]
    statistics = RidgeStatistics(1, 1, 6, constant=5)
    for part, target in zip(parts, targets, strict=True):
        statistics.add(0, part, target)
    x, y = torch.cat(parts, 1)[0, :, :5].double(), torch.cat(targets, 1)[0].double()
    mean, deviation = x.mean(0), x.std(0, correction=0)
    standard = (x - mean) / deviation
    gram = standard.T @ standard / len(x) + RIDGE * torch.eye(5, dtype=torch.float64)
    slopes = torch.linalg.solve(gram, standard.T @ (y - y.mean()) / len(x)) / deviation
    expected = torch.cat([slopes, (y.mean() - mean @ slopes)[None]])
    torch.testing.assert_close(statistics.solve(0, 6)[0].double(), expected, atol=1e-4, rtol=1e-4)


def test_a_regression_on_the_first_features_needs_no_other_sums() -> None:
    features, targets = normal(0, 2, 80, 5), normal(1, 2, 80)
    features[..., 2] = 1
    whole, part = RidgeStatistics(1, 2, 5, constant=2), RidgeStatistics(1, 2, 3, constant=2)
    whole.add(0, features, targets)
    part.add(0, features[..., :3], targets)
    torch.testing.assert_close(whole.solve(0, 3), part.solve(0, 3))


def test_weights_find_what_passes_keep_of_a_text_not_learned_from() -> None:
    learner = learner_of(*map(Prefix, range(3)))
    weights, other = learner.solve(), Prefix(50)
    assert weights.num_prefixes == learner.num_texts == 3 and weights.recall is None
    recall = learner.recall(weights, other.text, 0.2)
    assert recall > 0.9
    window = torch.stack([other.features(layer)[..., -NUM_WINDOW:] for layer in range(LAYERS)])
    found = score_range(weights.window, other.tokens, ROTARY, window)
    assert top_recall(found[..., 4:], other.scores[..., 4:], 0.2) == pytest.approx(recall, abs=0.01)
    assert learner.recall(weights, Prefix(51, noise=True).text, 0.2) < 0.5


def test_layers_with_a_window_are_not_learned_from_and_count_for_nothing() -> None:
    """Readers' scores of theirs are nonsense here: they neither help nor hurt what is found in the other layer."""
    prefixes = [Prefix(seed) for seed in range(4)]
    for prefix in prefixes:
        prefix.scores[0] = 1e6
    learner = learner_of(*prefixes[:3], geometry=replace(GEOMETRY, windows=(16, 0)))
    weights = learner.solve()
    assert learner.recall(weights, prefixes[3].text, 0.2) > 0.9
    assert not weights.cache[0].any() and not weights.window[0].any() and weights.window[1].any()


def test_the_sums_stay_as_large_as_they_are_and_long_texts_count_no_more() -> None:
    learner = learner_of(Prefix(0))
    statistics, columns = learner._statistics, num_cache_features(DIM) + NUM_WINDOW
    learner.add(Prefix(1, num_tokens=3000).text)
    num_bytes = sum(each.nbytes for each in vars(statistics).values() if isinstance(each, torch.Tensor))
    assert num_bytes == LAYERS * HEADS * columns * (columns + 1) * 8
    counted = statistics._gram[0, 0, statistics.constant, statistics.constant]
    assert 146 + SAMPLED_TOKENS // 2 < counted <= 146 + SAMPLED_TOKENS  # the first 4 tokens are left out


def test_without_window_attention_the_cache_alone_is_learned_from() -> None:
    prefix = Prefix(0, num_tokens=600)
    learner = ScoreLearner(GEOMETRY, ROTARY)
    learner.add(ScoredText(prefix.tokens, prefix.scores, lambda layer: replace(prefix.show(layer), signals={})))
    weights = learner.solve()
    assert not weights.window[..., -NUM_WINDOW:].any()
    torch.testing.assert_close(weights.window[..., :-NUM_WINDOW], weights.cache)


@pytest.mark.parametrize(("num_ranks", "num_heads"), [(1, 4), (2, 4), (4, 4), (8, 4), (2, 1)])
def test_what_is_learned_of_all_heads_is_put_together_from_what_ranks_have(num_ranks: int, num_heads: int) -> None:
    whole, per_rank = normal(0, 3, num_heads, 5), max(num_heads // num_ranks, 1)
    parts = [heads_of_rank(whole, rank, num_ranks, per_rank) for rank in range(num_ranks)]
    assert all(part.shape == (3, per_rank, 5) for part in parts)
    assert torch.equal(of_all_heads(parts, num_heads), whole)


def test_ranks_with_one_head_agree_on_the_mean() -> None:
    assert (of_all_heads([torch.full((2, 1, 5), value) for value in (1.0, 3.0)], 1) == 2).all()


def test_recall_is_the_share_of_the_highest_scores_that_are_found() -> None:
    scores = torch.arange(20.0).view(1, 2, 10)
    assert top_recall(scores * 2 - 7, scores, 0.2) == 1.0
    assert top_recall(-scores, scores, 0.2) == 0.0
    swapped = scores.clone()
    swapped[0, 1, 9], swapped[0, 0, 0] = 0.0, 19.0
    assert top_recall(swapped, scores, 0.2) == 0.75
