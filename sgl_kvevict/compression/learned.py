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
    windows = [part for layer in shown if (part := window_features(layer)) is not None]
    learned = weights.score(tokens, rotary, torch.stack(windows) if windows else None)
    return lambda layer: shown[layer].with_signals({Signal.LEARNED_SCORES: learned[layer]})
