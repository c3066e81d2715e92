"""Compressors to which scores are known at any time."""

from __future__ import annotations

import torch

from kvevict_kernels.rotary import Rotary
from sgl_kvevict.distill.features import NUM_WINDOW, num_cache_features
from sgl_kvevict.distill.weights import LearnedScores, ScoreWeights
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.segments.ranker import Compressor


class LearnedCompressor(Compressor):
    """As if scores had been learned: any range can be compressed at any time."""

    scores_any_range = True


def random_scores(geometry: KVGeometry, rotary: Rotary) -> LearnedScores:
    """Learned scores of small random weights: what is kept is of no use, what it costs is the same."""
    generator = torch.Generator().manual_seed(1)
    columns = num_cache_features(geometry.head_dim)
    shape = (geometry.num_layers, geometry.num_kv_heads)
    cache, window = (torch.randn(*shape, n, generator=generator) / 100 for n in (columns, columns + NUM_WINDOW))
    return LearnedScores(rotary, ScoreWeights(cache, window, 8))
