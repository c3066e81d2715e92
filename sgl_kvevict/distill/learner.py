"""Learns score weights from texts that the model has repeated, and measures their recall on another one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvevict_kernels.rotary import Rotary
from sgl_kvevict.distill.features import NUM_WINDOW, CachedRange, cache_features, num_cache_features, window_features
from sgl_kvevict.distill.weights import ScoreWeights
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.policies.layer_view import Show

RIDGE = 0.003
"""Ridge penalty on standardised features, per token."""
SAMPLED_TOKENS = 1024
"""Maximum number of tokens per text: bounds the time and weight of long ones."""
NUM_SINKS = 4
"""First tokens of a path, not learned from: attention sinks whatever their content, and kept anyway."""
MIN_RECALL = 0.7
"""Share of what repetitions attend to most, below which a warning is logged; repetitions in two orders agree on 0.9."""
SCORE_FLOOR = 0.005
"""Added to attention before its logarithm, so that tokens with almost none get the same score."""


@dataclass(frozen=True)
class ScoredText:
    """A cached text, and the attention that its repetitions paid it.

    Attributes:
        tokens: its first tokens, uncompressed.
        scores: [num_layers, num_kv_heads, num_tokens], float32, 2-norm of the attention over queries and the group's
            heads; what layers with a sliding window have is not used.
        show: views of its layers, which have the text's last queries.
    """

    tokens: CachedRange
    scores: Tensor
    show: Show

    def sampled_scores(self, layers: int | list[int]) -> Tensor:
        """[..., sampled tokens], float32: scores of some layers."""
        sample = self._sample
        return self.scores[layers][..., sample.start - self.tokens.start :: sample.stride]

    def features(self, layer: int, rotary: Rotary) -> Tensor:
        """[num_kv_heads, sampled tokens, F], float32: features of one layer, window attention last."""
        tokens, sample = self.tokens, self._sample
        window = window_features(self.show(layer))
        features = cache_features(sample, layer, rotary)
        if window is None:  # the policy uses the cache alone; constant zeros get no weight
            window = features.new_zeros(features.shape[0], tokens.token_slots.numel(), NUM_WINDOW)
        sampled = window[:, sample.start - tokens.start :: sample.stride]
        return torch.cat([features, sampled], dim=-1)

    @property
    def _sample(self) -> CachedRange:
        return self.tokens.sample(NUM_SINKS, SAMPLED_TOKENS)


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

    def add(self, layer: int, features: Tensor, targets: Tensor) -> None:
        """Add tokens of one layer: features [num_heads, num_tokens, num_features], targets [num_heads, num_tokens]."""
        # float64: sums of products over 16 texts are differenced below, where float32 would leave noise.
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
        # A feature that never varied, such as window attention that was not kept, would divide by 0.
        deviation = centred.diagonal(dim1=-2, dim2=-1).clamp_min(1e-10).sqrt()
        standard = centred / (deviation[:, :, None] * deviation[:, None, :])
        standard.diagonal(dim1=-2, dim2=-1).add_(RIDGE)
        weights: Tensor = torch.linalg.solve(standard, cross / deviation) / deviation
        # The constant was centred to 0. It is set so that predictions have the targets' mean, without a penalty, which
        # would shift heads against each other.
        weights[:, self.constant] = target_mean[:, 0] - (mean * weights).sum(-1)
        return weights.float()


class ScoreLearner:
    """Learns the weights of one model from any number of texts in constant memory: a text leaves sums of products."""

    def __init__(self, geometry: KVGeometry, rotary: Rotary, device: torch.device | None = None) -> None:
        self._geometry = geometry
        self._device = device
        self._rotary = rotary
        self._num_features = num_cache_features(geometry.head_dim, geometry.is_latent)
        sizes = (geometry.num_layers, geometry.num_kv_heads, self._num_features + NUM_WINDOW)
        self._statistics = RidgeStatistics(*sizes, constant=self._num_features - 1, device=device)
        self.num_texts = 0

    def add(self, text: ScoredText) -> None:
        """Learn from a text.

        Cost: at most ``SAMPLED_TOKENS * F**2`` products per head and layer, in float64.
        """
        # Layers with a window keep their last tokens whatever these are, so there is nothing to learn.
        for layer in self._geometry.full_layers:
            # Logarithms, because attention spans orders of magnitude and only its order decides.
            targets = (text.sampled_scores(layer) + SCORE_FLOOR).log()
            self._statistics.add(layer, text.features(layer, self._rotary), targets)
        self.num_texts += 1

    def solve(self) -> ScoreWeights:
        """Weights from all texts so far (at least one); 0 for layers with a sliding window."""
        weights = ScoreWeights.zeros(self._geometry, self._device, self.num_texts)
        for layer in self._geometry.full_layers:
            weights.cache[layer] = self._statistics.solve(layer, self._num_features)
            weights.window[layer] = self._statistics.solve(layer, self._num_features + NUM_WINDOW)
        return weights

    def recall(self, weights: ScoreWeights, text: ScoredText, share: float) -> float:
        """Share of the entries of a text with most attention (``share`` of all) that ``weights`` keep, too."""
        layers = list(self._geometry.full_layers)
        predicted = [text.features(layer, self._rotary) @ weights.window[layer].unsqueeze(-1) for layer in layers]
        return top_recall(torch.stack(predicted).squeeze(-1), text.sampled_scores(layers), share)


def top_recall(predicted: Tensor, scores: Tensor, share: float) -> float:
    """Share of the top scores, over all layers and heads, that are among the top predictions.

    Both are [num_layers, num_kv_heads, num_tokens]; the top is ``share`` of the entries.
    """
    count = max(int(share * scores.numel()), 1)
    kept = torch.zeros(scores.numel(), dtype=torch.bool, device=scores.device)
    kept[scores.flatten().topk(count).indices] = True
    return float(kept[predicted.flatten().topk(count).indices].sum()) / count
