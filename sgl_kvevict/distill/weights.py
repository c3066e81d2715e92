"""Learned weights, and scores of cached tokens by them: one pass over keys and values, many layers at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvevict_kernels.rotary import Rotary
from kvevict_kernels.stored_rows import row_products
from sgl_kvevict.distill.features import (
    NUM_SCALARS,
    NUM_WINDOW,
    CachedRange,
    log_norm,
    num_cache_features,
    window_features,
)
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.policies.layer_view import Show
from sgl_kvevict.policies.signals import Signal

TOKENS_AT_ONCE = 16_384
"""Of a range that is scored: tables of cosines, norms and products of all layers lie beside the pool meanwhile."""


@dataclass(frozen=True)
class ScoreWeights:
    """Linear maps from features to the logarithm of a token's reader attention, one for each (layer, KV head).

    Attributes:
        cache: [num_layers, num_kv_heads, num_cache_features], float32: from the cache alone.
        window: [num_layers, num_kv_heads, num_cache_features + NUM_WINDOW], float32: with window attention.
        num_prefixes: texts learned from.
        recall: share of the entries with most attention that the weights find on another text; None if not measured.

    Source: KVzap (arXiv 2601.07891) predicts KVzip's scores from hidden states by a published model.
    Differs: from keys, values and positions, because the cache holds no hidden states; fitted by ridge regression
        before a server opens its port, so that any model can have its own.
    """

    cache: Tensor
    window: Tensor
    num_prefixes: int
    recall: float | None = None

    @classmethod
    def zeros(cls, geometry: KVGeometry, device: torch.device | None = None, num_prefixes: int = 0) -> ScoreWeights:
        """Weights that score all tokens alike, of a rank's heads."""
        columns = num_cache_features(geometry.head_dim, geometry.is_latent)
        heads = (geometry.num_layers, geometry.num_kv_heads)
        cache = torch.zeros(*heads, columns, device=device)
        return cls(cache, torch.zeros(*heads, columns + NUM_WINDOW, device=device), num_prefixes)


def of_all_heads(parts: Sequence[Tensor], num_kv_heads: int) -> Tensor:
    """[num_layers, num_kv_heads, columns] of all heads, from the heads of each tensor-parallel rank, by rank.

    The mean where several ranks hold the same head, each with other query heads (more ranks than KV heads, or latents);
    the inverse of :func:`heads_of_rank`.
    """
    num_layers, num_heads, columns = parts[0].shape
    total = parts[0].new_zeros(num_layers, num_kv_heads, columns)
    count = parts[0].new_zeros(num_kv_heads, 1)
    for rank, part in enumerate(parts):
        # With more ranks than heads several ranks begin at the same one, as SGLang places them.
        first = rank * num_kv_heads // len(parts)
        total[:, first : first + num_heads] += part
        count[first : first + num_heads] += 1
    return total / count


def heads_of_rank(whole: Tensor, rank: int, num_ranks: int, num_kv_heads: int) -> Tensor:
    """The heads of a tensor-parallel rank, which holds ``num_kv_heads`` consecutive ones, of [num_layers, heads, n]."""
    first = rank * whole.shape[1] // num_ranks
    return whole[:, first : first + num_kv_heads].contiguous()


@dataclass(eq=False)
class LearnedScores:
    """The weights that a server scores with, known before its first request.

    Attributes:
        rotary: the model's rotary embedding.
        weights: of this rank's heads; None while they are being learned.
        is_stale: the model's weights have changed since; the scores of the old ones stay in use.
    """

    rotary: Rotary
    weights: ScoreWeights | None = None
    is_stale: bool = False


def with_learned_scores(show: Show, weights: ScoreWeights, tokens: CachedRange, rotary: Rotary) -> Show:
    """Score a range in all layers at once, and add :attr:`Signal.LEARNED_SCORES` to each layer's view."""
    shown = [show(layer) for layer in range(tokens.num_layers)]
    windows = [window_features(layer) for layer in shown]
    seen = next((part for part in windows if part is not None), None)
    window = None
    if seen is not None:  # layers with a sliding window are not observed; their weights are 0 and scores unused
        window = torch.stack([torch.zeros_like(seen) if part is None else part for part in windows])
    learned = score_range(weights.cache if window is None else weights.window, tokens, rotary, window)
    return lambda layer: shown[layer].with_signals({Signal.LEARNED_SCORES: learned[layer]})


def score_range(weights: Tensor, tokens: CachedRange, rotary: Rotary, window: Tensor | None = None) -> Tensor:
    """Learned scores of a range: features times weights, without materialising the features.

    Weights are rotated to the tokens' positions instead of keys back to position 0; the product is the same.
    ``weights`` is [num_layers, num_kv_heads, F], float32 (ValueError for another shape); with ``window``, [num_layers,
    num_kv_heads, num_tokens, NUM_WINDOW], float32, F includes window attention. The result, [num_layers, num_kv_heads,
    num_tokens], float32, has logarithms of scores, comparable over layers and heads.

    Cost: that of :func:`row_products` of keys and of values; no host sync; memory for some tokens at a time.
    """
    num_layers, _, num_heads, head_dim = tokens.k_arena.shape
    num_features = num_cache_features(head_dim, tokens.is_latent)
    columns = num_features + (0 if window is None else NUM_WINDOW)
    if tuple(weights.shape) != (num_layers, num_heads, columns):
        raise ValueError(f"weights: expected {(num_layers, num_heads, columns)}, got {tuple(weights.shape)}")
    num_tokens = tokens.token_slots.numel()
    scores = torch.empty(num_layers, num_heads, num_tokens, device=weights.device)
    for first in range(0, num_tokens, TOKENS_AT_ONCE):
        part = slice(first, first + TOKENS_AT_ONCE)
        scores[..., part] = _score_part(weights[..., :num_features], tokens.cut(part), rotary).transpose(1, 2)
    if window is not None:
        scores += (window @ weights[..., -NUM_WINDOW:, None]).squeeze(-1)
    return scores


def _score_part(weights: Tensor, tokens: CachedRange, rotary: Rotary) -> Tensor:
    """[num_layers, num_tokens, num_kv_heads], float32: scores from the cache alone."""
    head_dim, slots, scales = tokens.k_arena.shape[-1], tokens.token_slots, tokens.scales
    w_keys, w_values, scalars = weights.tensor_split((head_dim, weights.shape[-1] - NUM_SCALARS), dim=-1)
    if tokens.is_latent:  # the keys' weights are those of the values, too, whose norm is a feature of its own
        w_values = weights.new_zeros(*weights.shape[:2], tokens.v_arena.shape[-1])
    turn = rotary.turn_of(tokens.rotary_positions, head_dim)
    keys, key_norms = row_products(tokens.k_arena, slots, w_keys.contiguous(), turn, scales.k)
    values, value_norms = row_products(tokens.v_arena, slots, w_values.contiguous(), scales=scales.v)
    w_key_norm, w_value_norm, w_place, constant = scalars[:, None].unbind(-1)
    scores = torch.addcmul(constant, w_place, (tokens.positions / tokens.end).float()[:, None]).add_(keys).add_(values)
    return scores.addcmul_(log_norm(key_norms), w_key_norm).addcmul_(log_norm(value_norms), w_value_norm)
