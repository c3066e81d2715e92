"""Scores of cached tokens by learned weights: one pass over keys and values, many layers at once."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvevict_kernels.rotary import Rotary
from kvevict_kernels.stored_rows import gather_rows
from kvevict_kernels.transfer import to_device
from sgl_kvevict.distill.features import NUM_WINDOW, CachedRange, log_norm, num_cache_features

_BLOCK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 25}
"""Keys (or values) in one block: what fits a core's caches; what keeps a device busy."""


def score_range(weights: Tensor, tokens: CachedRange, rotary: Rotary, window: Tensor | None = None) -> Tensor:
    """Learned scores of a range: features times weights, without writing the features down.

    Weights are rotated to the tokens' positions instead of keys back to position 0: the product is the same.

    Args:
        weights: [num_layers, num_kv_heads, F], float32; F with or without window attention.
        tokens: the range.
        rotary: the model's rotary embedding.
        window: [num_layers, num_kv_heads, num_tokens, NUM_WINDOW], float32, if the weights want it.

    Returns:
        [num_layers, num_kv_heads, num_tokens], float32: logarithms of scores, comparable over layers and heads.

    Raises:
        ValueError: weights for other heads, or for other features.

    Cost: ten operations or so for every number in the range; no host sync.
    """
    num_layers, _, num_heads, head_dim = tokens.k_arena.shape
    columns = num_cache_features(head_dim) + (0 if window is None else NUM_WINDOW)
    if tuple(weights.shape) != (num_layers, num_heads, columns):
        raise ValueError(f"weights: expected {(num_layers, num_heads, columns)}, got {tuple(weights.shape)}")
    scores = torch.empty(num_layers, tokens.token_slots.numel(), num_heads, device=weights.device)
    positions = tokens.positions
    for layers, part in _blocks(tokens):
        _score_block(scores[layers, part], weights[layers], tokens, layers, part, positions[part], rotary)
    scores = scores.transpose(1, 2).contiguous()
    if window is not None:
        scores += (window @ weights[..., -NUM_WINDOW:, None]).squeeze(-1)
    return scores


def _score_block(
    scores: Tensor,
    weights: Tensor,
    tokens: CachedRange,
    layers: slice,
    part: slice,
    positions: Tensor,
    rotary: Rotary,
) -> None:
    """Write [layers, tokens, num_kv_heads] of a part of the tokens in some layers."""
    head_dim = tokens.k_arena.shape[-1]
    slots = tokens.token_slots[part]
    per_token = weights[:, None]
    w_keys, w_values = per_token[..., :head_dim], per_token[..., head_dim : 2 * head_dim]
    scalars = per_token[..., 2 * head_dim : num_cache_features(head_dim)]
    w_key_norm, w_value_norm, w_place, constant = scalars.unbind(-1)
    torch.addcmul(constant, w_place, (positions / tokens.end).float()[:, None], out=scores)
    k_scales, v_scales = (_per_layer(scales[layers], slots) for scales in (tokens.scales.k, tokens.scales.v))
    keys = gather_rows(tokens.k_arena[layers], slots, k_scales, dim=1).float()
    scores.addcmul_(log_norm(keys), w_key_norm)
    scores += keys.mul_(rotary.turn(w_keys, positions)).sum(-1)
    values = keys.copy_(gather_rows(tokens.v_arena[layers], slots, v_scales, dim=1))
    scores.addcmul_(log_norm(values), w_value_norm)
    scores += values.mul_(w_values).sum(-1)


def _per_layer(scales: tuple[float, ...], slots: Tensor) -> Tensor | float:
    """[layers, 1, 1, 1] on the device of the slots; 1 where nothing is scaled."""
    return to_device(torch.tensor(scales), slots.device).view(-1, 1, 1, 1) if scales else 1.0


def _blocks(tokens: CachedRange) -> Iterator[tuple[slice, slice]]:
    """Layers and tokens that are scored at once."""
    num_layers, _, num_heads, head_dim = tokens.k_arena.shape
    room = _BLOCK_ELEMENTS[tokens.k_arena.device.type] // (num_heads * head_dim)
    num_tokens = tokens.token_slots.numel()
    step = max(min(room, num_tokens), 1)
    group = max(min(room // step, num_layers), 1)
    for layer in range(0, num_layers, group):
        for first in range(0, num_tokens, step):
            yield slice(layer, min(layer + group, num_layers)), slice(first, min(first + step, num_tokens))
