"""Learning from scored prefixes: sums of products, trials on prefixes not learned from yet, and when to stop."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sgl_kvevict.distill import CachedRange, LessonResult, ScoreLearner, window_features
from sgl_kvevict.distill.features import NUM_WINDOW, cache_features, num_cache_features
from sgl_kvevict.distill.learner import RIDGE, SAMPLED_TOKENS, RidgeStatistics, top_recall
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.policies import LayerView, QueryWindow, Rotary, Signal
from sgl_kvevict.policies.scorers import SCORE_FLOOR

LAYERS, HEADS, DIM = 2, 2, 8
GEOMETRY = KVGeometry(LAYERS, 2 * HEADS, HEADS, DIM, 4000)
ROTARY = Rotary(torch.cat([torch.ones(4000, 2), torch.zeros(4000, 2)], dim=-1), True)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


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

    def teach(self, learner: ScoreLearner) -> LessonResult:
        lesson = learner.lesson(self.tokens, self.scores, self.show)
        results = [lesson.step() for _ in range(LAYERS)]
        assert results[:-1] == [None] * (LAYERS - 1) and results[-1] is not None
        return results[-1]


def learner(num_prefixes: int = 3, **kwargs: object) -> ScoreLearner:
    return ScoreLearner(GEOMETRY, ROTARY, 0.2, num_prefixes, **kwargs)  # type: ignore[arg-type]


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


def test_weights_are_in_use_after_they_found_enough_of_another_prefix() -> None:
    pupil = learner(3)
    for seed in range(3):
        assert Prefix(seed).teach(pupil) == LessonResult(seed + 1, None, False)
        assert pupil.weights is None and pupil.state()["learning_bytes"]
    result = Prefix(3).teach(pupil)
    assert result.is_accepted and result.num_prefixes == 4 and result.recall is not None and result.recall > 0.9
    assert pupil.weights is not None and pupil.weights.num_prefixes == 3
    assert pupil.state() == {"in_use": True, "prefixes": 3, "recall": result.recall, "learning_bytes": 0}
    other = Prefix(50)
    window = torch.stack([other.features(layer)[..., -NUM_WINDOW:] for layer in range(LAYERS)])
    found = pupil.weights.score(other.tokens, ROTARY, window)
    assert top_recall(found, other.scores, 0.2) > 0.9
    with pytest.raises(ValueError, match="are in use"):
        other.teach(pupil)


def test_layers_with_a_window_are_not_learned_from_and_count_for_nothing() -> None:
    """Readers' scores of theirs are nonsense here: they neither help nor hurt what is found in the other layer."""
    pupil = ScoreLearner(replace(GEOMETRY, windows=(16, 0)), ROTARY, 0.2, 3)
    for seed in range(4):
        prefix = Prefix(seed)
        prefix.scores[0] = 1e6
        lesson = pupil.lesson(prefix.tokens, prefix.scores, prefix.show)
        result = lesson.step()
        assert result is not None
    assert result.is_accepted and result.recall is not None and result.recall > 0.9
    assert pupil.weights is not None
    assert not pupil.weights.cache[0].any() and not pupil.weights.window[0].any() and pupil.weights.window[1].any()


def test_what_finds_too_little_is_not_used_and_learning_goes_on() -> None:
    pupil = learner(2)
    results = [Prefix(seed, noise=True).teach(pupil) for seed in range(5)]
    assert [result.recall is None for result in results] == [True, True, False, False, False]
    assert not any(result.is_accepted for result in results) and pupil.weights is None
    assert pupil.state()["prefixes"] == 5


def test_ranks_use_weights_only_if_all_of_them_may() -> None:
    pupil = learner(1, agree=lambda value: min(value, 500))
    Prefix(0).teach(pupil)
    result = Prefix(1).teach(pupil)
    assert result.recall == 0.5 and not result.is_accepted and pupil.weights is None


def test_the_sums_stay_as_large_as_they_are_and_long_prefixes_count_no_more() -> None:
    pupil = learner(9)
    Prefix(0).teach(pupil)
    size = pupil.state()["learning_bytes"]
    columns = num_cache_features(DIM) + NUM_WINDOW
    assert size == LAYERS * HEADS * columns * (columns + 1) * 8
    Prefix(1, num_tokens=3000).teach(pupil)
    assert pupil.state()["learning_bytes"] == size
    statistics = pupil._statistics
    assert statistics is not None
    counted = statistics._gram[0, 0, statistics.constant, statistics.constant]
    assert 146 + SAMPLED_TOKENS // 2 < counted <= 146 + SAMPLED_TOKENS  # the first 4 tokens are left out


def test_without_window_attention_the_cache_alone_is_learned_from() -> None:
    pupil = learner(1)
    for seed in range(2):
        prefix = Prefix(seed, num_tokens=600)
        shown = [replace(prefix.show(layer), signals={}) for layer in range(LAYERS)]
        lesson = pupil.lesson(prefix.tokens, prefix.scores, shown.__getitem__)
        result = [lesson.step() for _ in range(LAYERS)][-1]
    assert result is not None and result.is_accepted and pupil.weights is not None
    assert not pupil.weights.window[..., -NUM_WINDOW:].any()
    torch.testing.assert_close(pupil.weights.window[..., :-NUM_WINDOW], pupil.weights.cache)


def test_new_model_weights_make_it_forget() -> None:
    pupil = learner(1)
    Prefix(0).teach(pupil)
    Prefix(1).teach(pupil)
    assert pupil.weights is not None
    pupil.forget()
    assert pupil.state() == {"in_use": False, "prefixes": 0, "recall": None, "learning_bytes": 0}
    assert Prefix(2).teach(pupil).num_prefixes == 1


def test_recall_is_the_share_of_the_highest_scores_that_are_found() -> None:
    scores = torch.arange(20.0).view(1, 2, 10)
    assert top_recall(scores * 2 - 7, scores, 0.2) == 1.0
    assert top_recall(-scores, scores, 0.2) == 0.0
    swapped = scores.clone()
    swapped[0, 1, 9], swapped[0, 0, 0] = 0.0, 19.0
    assert top_recall(swapped, scores, 0.2) == 0.75
