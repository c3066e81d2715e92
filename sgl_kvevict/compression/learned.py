"""Adds learned scores to what a policy sees of a range."""

from __future__ import annotations

import torch

from kvevict_kernels.rotary import Rotary
from sgl_kvevict.distill import CachedRange, ScoreWeights, window_features
from sgl_kvevict.policies.layer_view import Show
from sgl_kvevict.policies.signals import Signal


def with_learned_scores(show: Show, weights: ScoreWeights, tokens: CachedRange, rotary: Rotary) -> Show:
    """Score a range in all layers at once.

    Args:
        show: what the prefill left behind of a layer.
        weights: learned ones.
        tokens: the range.
        rotary: the model's rotary embedding.

    Returns:
        The same as ``show``, with learned scores.
    """
    shown = [show(layer) for layer in range(tokens.num_layers)]
    windows = [window_features(layer) for layer in shown]
    seen = next((part for part in windows if part is not None), None)
    window = None
    if seen is not None:
        # Layers with a sliding window were not observed. Their weights are 0, and nobody looks at their scores.
        window = torch.stack([torch.zeros_like(seen) if part is None else part for part in windows])
    learned = weights.score(tokens, rotary, window)
    return lambda layer: shown[layer].with_signals({Signal.LEARNED_SCORES: learned[layer]})
