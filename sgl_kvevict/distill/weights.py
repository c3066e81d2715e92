"""Learned weights: what one model's heads make of a cached token. They say nothing about any text."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvevict_kernels.rotary import Rotary
from sgl_kvevict.distill.features import CachedRange
from sgl_kvevict.distill.scoring import score_range


@dataclass(frozen=True)
class ScoreWeights:
    """Linear maps from features to the logarithm of a token's reconstruction score, one for each (layer, KV head).

    Attributes:
        cache: [num_layers, num_kv_heads, num_cache_features], float32: from the cache alone.
        window: [num_layers, num_kv_heads, num_cache_features + NUM_WINDOW], float32: with window attention.
        num_prefixes: prefixes that they were fitted to.
        recall: share of the set that passes keep of another prefix that they keep too; None if nobody looked.

    Source: KVzap (arXiv 2601.07891) predicts KVzip's scores from hidden states by a published model.
    Differs: from keys, values and positions, which the cache still holds when the hidden states are gone; fitted on
        the spot by ridge regression, so that any model can have its own.
    """

    cache: Tensor
    window: Tensor
    num_prefixes: int
    recall: float | None = None

    def to(self, device: torch.device) -> ScoreWeights:
        """The same on a device."""
        return replace(self, cache=self.cache.to(device), window=self.window.to(device))

    def digest(self) -> int:
        """A positive number that other weights most likely do not have."""
        return 1 + zlib.crc32(b"".join(part.cpu().numpy().tobytes() for part in (self.cache, self.window)))

    def of_rank(self, rank: int, num_ranks: int, num_kv_heads: int) -> ScoreWeights:
        """The part of one tensor-parallel rank, which holds consecutive heads, or a copy of one.

        Args:
            rank: from 0.
            num_ranks: how many share the layer's heads.
            num_kv_heads: heads that each of them holds.
        """
        first = rank * self.cache.shape[1] // num_ranks
        heads = slice(first, first + num_kv_heads)
        return replace(self, cache=self.cache[:, heads].contiguous(), window=self.window[:, heads].contiguous())

    def score(self, tokens: CachedRange, rotary: Rotary, window: Tensor | None) -> Tensor:
        """Score a range, with window attention where there is some.

        Args:
            tokens: the range.
            rotary: the model's rotary embedding.
            window: [num_layers, num_kv_heads, num_tokens, NUM_WINDOW], float32, or None.

        Returns:
            [num_layers, num_kv_heads, num_tokens], float32; higher = keep.
        """
        return score_range(self.cache if window is None else self.window, tokens, rotary, window)
