"""Learns score weights from scoring passes, prefix by prefix and layer by layer, until recall suffices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvevict_kernels.rotary import Rotary
from sgl_kvevict.distill.features import (
    NUM_WINDOW,
    CachedRange,
    cache_features,
    num_cache_features,
    window_features,
)
from sgl_kvevict.distill.weights import ScoreWeights
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.policies.layer_view import Show
from sgl_kvevict.policies.scorers import log_attention

RIDGE = 0.003
"""Ridge penalty on standardised features, per token."""
SAMPLED_TOKENS = 1024
"""Maximum number of tokens per prefix: bounds the time and weight of long prefixes."""
NUM_SINKS = 4
"""First tokens of a path, not learned from: attention sinks whatever their content, and kept anyway."""
MIN_RECALL = 0.7
"""Required share of the passes' selection. Echo attention recalls 0.55; passes in two orders agree on 0.9."""


@dataclass(frozen=True)
class LessonResult:
    """Outcome of one prefix.

    ``recall`` is measured on the prefix before learning from it; None while there are too few prefixes. With
    ``is_accepted`` the weights are in use from now on.
    """

    num_prefixes: int
    recall: float | None
    is_accepted: bool


class RidgeStatistics:
    """Sufficient statistics of one ridge regression per (layer, KV head), in float64; their size is constant.

    ``constant`` is the index of the feature that is 1 for every token.
    """

    def __init__(
        self, num_layers: int, num_heads: int, num_features: int, constant: int, device: torch.device | None = None
    ) -> None:
        shape = (num_layers, num_heads, num_features)
        self.constant = constant
        self._gram = torch.zeros(*shape, num_features, dtype=torch.float64, device=device)
        self._cross = torch.zeros(shape, dtype=torch.float64, device=device)

    @property
    def num_bytes(self) -> int:
        """Memory of the sums."""
        return (self._gram.numel() + self._cross.numel()) * 8

    def add(self, layer: int, features: Tensor, targets: Tensor) -> None:
        """Add tokens of one layer: features [num_heads, num_tokens, num_features], targets [num_heads, num_tokens]."""
        columns = features.double()
        self._gram[layer].baddbmm_(columns.mT, columns)
        self._cross[layer] += (columns.mT @ targets.double().unsqueeze(-1)).squeeze(-1)

    def solve(self, layer: int, num_columns: int) -> Tensor:
        """[num_heads, num_columns], float32: weights of one layer, by ridge regression on standardised features.

        Only the first ``num_columns`` features are used, which must include the constant (not penalised). The layer
        must have tokens.
        """
        gram = self._gram[layer, :, :num_columns, :num_columns]
        count = gram[:, self.constant, self.constant, None]
        mean = gram[:, self.constant] / count
        target_mean = self._cross[layer, :, self.constant, None] / count
        centred = gram / count[..., None] - mean[:, :, None] * mean[:, None, :]
        cross = self._cross[layer, :, :num_columns] / count - mean * target_mean
        deviation = centred.diagonal(dim1=-2, dim2=-1).clamp_min(1e-10).sqrt()
        standard = centred / (deviation[:, :, None] * deviation[:, None, :])
        standard.diagonal(dim1=-2, dim2=-1).add_(RIDGE)
        weights: Tensor = torch.linalg.solve(standard, cross / deviation) / deviation
        weights[:, self.constant] = target_mean[:, 0] - (mean * weights).sum(-1)
        return weights.float()


class ScoreLearner:
    """Holds the weights in use, or learns them.

    After ``num_prefixes`` prefixes, weights are tested on each new prefix before learning from it. They are used once
    they recall ``MIN_RECALL`` of the entries that its reader attention would keep.
    Recall is measured with ``share`` of the entries kept. ``weights`` are in use from the start; None: learn. ``agree``
    takes the minimum of a number over tensor-parallel ranks.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        rotary: Rotary,
        share: float,
        num_prefixes: int,
        weights: ScoreWeights | None = None,
        agree: Callable[[int], int] = lambda value: value,
    ) -> None:
        self.geometry = geometry
        self.rotary = rotary
        self.share = share
        self.num_prefixes = num_prefixes
        self.weights = weights
        self.num_learned = 0
        self._agree = agree
        self._statistics: RidgeStatistics | None = None

    def lesson(self, tokens: CachedRange, scores: Tensor, show: Show) -> Lesson:
        """Begin to learn from one prefix; ValueError if weights are in use.

        The slots of ``tokens`` must not change before the lesson ends. ``scores``, [num_layers, num_kv_heads,
        num_tokens], float32, are reader attention; views of ``show`` have the last queries of a prompt that continues
        the range.
        """
        if self.weights is not None:
            raise ValueError("learned weights are in use: there is nothing to learn")
        if self._statistics is None:
            cache = num_cache_features(self.geometry.head_dim, self.geometry.is_latent)
            sizes = (self.geometry.num_layers, self.geometry.num_kv_heads, cache + NUM_WINDOW)
            self._statistics = RidgeStatistics(*sizes, constant=cache - 1, device=tokens.k_arena.device)
        return Lesson(self, self._statistics, tokens, scores, show)

    def end_lesson(self, weights: ScoreWeights | None, overlap: int | None) -> LessonResult:
        """Count a prefix, and use the tested weights if their recall (``overlap``, in thousandths) suffices."""
        self.num_learned += 1
        if weights is None or overlap is None:
            return LessonResult(self.num_learned, None, False)
        recall = self._agree(overlap) / 1000
        if recall >= MIN_RECALL:
            self.weights = ScoreWeights(weights.cache, weights.window, weights.num_prefixes, recall)
            self._statistics = None
        return LessonResult(self.num_learned, recall, self.weights is not None)

    def forget(self) -> None:
        """Start anew, because the model's weights changed."""
        self.weights = self._statistics = None
        self.num_learned = 0

    def state(self) -> dict[str, int | float | bool | None]:
        """Progress as plain values."""
        weights = self.weights
        return {
            "in_use": weights is not None,
            "prefixes": self.num_learned if weights is None else weights.num_prefixes,
            "recall": None if weights is None else weights.recall,
            "learning_bytes": 0 if self._statistics is None else self._statistics.num_bytes,
        }


class Lesson:
    """Learns from one prefix, layer by layer; made by :meth:`ScoreLearner.lesson`."""

    def __init__(
        self, learner: ScoreLearner, statistics: RidgeStatistics, tokens: CachedRange, scores: Tensor, show: Show
    ) -> None:
        self._learner = learner
        self._statistics = statistics
        self._tokens = tokens
        self._sample = tokens.sample(NUM_SINKS, SAMPLED_TOKENS)
        self._scores = scores
        self._show = show
        geometry = learner.geometry
        self._layers = geometry.full_layers
        num_features = num_cache_features(geometry.head_dim, geometry.is_latent)
        shape = (geometry.num_layers, geometry.num_kv_heads, num_features)
        self._cache = scores.new_zeros(shape)
        self._window = scores.new_zeros(*shape[:-1], num_features + NUM_WINDOW)
        self._predicted: list[Tensor] = []
        self._tries = learner.num_learned >= learner.num_prefixes
        self._num_done = 0

    def step(self) -> LessonResult | None:
        """Learn from the next layer without a window; after the last one, return the outcome.

        Cost: at most ``SAMPLED_TOKENS * F**2`` products per head of one layer, in float64; when weights are tested, the
            last step also ranks all scores.
        """
        layer = self._layers[self._num_done]
        features, targets = self._examples(layer)
        if self._tries:
            self._cache[layer] = self._statistics.solve(layer, self._cache.shape[-1])
            self._window[layer] = self._statistics.solve(layer, self._window.shape[-1])
            self._predicted.append((features @ self._window[layer].unsqueeze(-1)).squeeze(-1))
        self._statistics.add(layer, features, targets)
        self._num_done += 1
        if self._num_done < len(self._layers):
            return None
        if not self._tries:
            return self._learner.end_lesson(None, None)
        weights = ScoreWeights(self._cache, self._window, self._learner.num_learned)
        scores = self._sampled_scores(list(self._layers))
        overlap = int(1000 * top_recall(torch.stack(self._predicted), scores, self._learner.share))
        return self._learner.end_lesson(weights, overlap)

    def _examples(self, layer: int) -> tuple[Tensor, Tensor]:
        """Features [num_kv_heads, sampled tokens, F] and targets [num_kv_heads, sampled tokens] of a layer."""
        tokens, sample = self._tokens, self._sample
        window = window_features(self._show(layer))
        features = cache_features(sample, layer, self._learner.rotary)
        if window is None:  # the policy uses the cache alone; constant zeros get no weight
            window = features.new_zeros(features.shape[0], tokens.token_slots.numel(), NUM_WINDOW)
        sampled = window[:, sample.start - tokens.start :: sample.stride]
        return torch.cat([features, sampled], dim=-1), log_attention(self._sampled_scores(layer))

    def _sampled_scores(self, layers: int | list[int]) -> Tensor:
        return self._scores[layers][..., self._sample.start - self._tokens.start :: self._sample.stride]


def top_recall(predicted: Tensor, scores: Tensor, share: float) -> float:
    """Share of the top scores, over all layers and heads, that are among the top predictions.

    Both are [num_layers, num_kv_heads, num_tokens]; the top is ``share`` of the entries.
    """
    count = max(int(share * scores.numel()), 1)
    kept = torch.zeros(scores.numel(), dtype=torch.bool, device=scores.device)
    kept[scores.flatten().topk(count).indices] = True
    return float(kept[predicted.flatten().topk(count).indices].sum()) / count
