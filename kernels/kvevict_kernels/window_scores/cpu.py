"""window_scores in vectorised torch, a chunk of keys at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from kvevict_kernels.stored_rows import gather_rows
from kvevict_kernels.window_scores.pooling import Pooling

KEYS_PER_CHUNK = 512
"""Bounds the memory of the attention weights, [num_qo_heads * W, keys] float32, to what caches hold."""


def window_scores_cpu(
    queries: Tensor,
    lse: Tensor,
    k_buffer: Tensor,
    token_slots: Tensor,
    sm_scale: float,
    first_key: int,
    pooling: Pooling,
) -> tuple[Tensor, Tensor]:
    """CPU path of :func:`kvevict_kernels.window_scores.window_scores`.

    Products are taken in float32: with bfloat16 inputs a bfloat16 product would be twice as fast here, but it
    rounds the scores to 8 bits before the exponential.
    ``first_key`` is the position of the first key relative to the first query, negative as a rule.
    """
    window_size, num_qo_heads, head_dim = queries.shape
    num_kv_heads = k_buffer.shape[1]
    num_keys = token_slots.numel()
    rows = window_size * (num_qo_heads // num_kv_heads)
    by_head = (window_size, num_kv_heads, -1)
    q = queries.view(*by_head, head_dim).transpose(0, 1).reshape(num_kv_heads, rows, head_dim).float()
    row_lse = lse.view(by_head).transpose(0, 1).reshape(num_kv_heads, rows, 1)
    halo = pooling.halo if pooling.pools_rows else 0
    mean = torch.empty(num_kv_heads, num_keys)
    pooled = torch.empty_like(mean)
    for begin in range(0, num_keys, KEYS_PER_CHUNK):
        end = min(begin + KEYS_PER_CHUNK, num_keys)
        low, high = max(0, begin - halo), min(num_keys, end + halo)
        keys = gather_rows(k_buffer, token_slots[low:high]).float()  # [keys, num_kv_heads, head_dim]
        p = torch.baddbmm(row_lse, q, keys.permute(1, 2, 0), beta=-1.0, alpha=sm_scale).exp_()
        _mask_future(p.view(num_kv_heads, window_size, -1, high - low), first_key + low)
        inside = slice(begin - low, end - low)
        mean[:, begin:end] = p[..., inside].mean(1)
        if pooling.pools_rows:
            pooled[:, begin:end] = pooling.pool(p.flatten(0, 1)).view_as(p)[..., inside].mean(1)
    return (pooled if pooling.pools_rows else pooling.pool(mean)), mean


def _mask_future(p: Tensor, first_key: int) -> None:
    """Zero the weights of keys that come after the query, in place.

    Args:
        p: [num_kv_heads, W, group_size, keys], attention weights.
        first_key: position of the first of these keys relative to the first query (tokens).
    """
    window_size, num_keys = p.shape[1], p.shape[3]
    begin = max(0, 1 - first_key)
    if begin >= num_keys:
        return
    future = first_key + torch.arange(begin, num_keys) > torch.arange(window_size)[:, None]  # [W, keys]
    p[..., begin:].masked_fill_(future[:, None], 0.0)
