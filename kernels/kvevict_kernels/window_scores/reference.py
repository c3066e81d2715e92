"""The definition of window_scores, one query row and one key at a time, in float32."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor


def window_scores_reference(
    queries: Tensor,
    lse: Tensor,
    k_buffer: Tensor,
    token_slots: Tensor,
    *,
    sm_scale: float,
    key_start: int,
    query_start: int,
    kernel_size: int = 1,
    pooling: Literal["max", "avg"] = "max",
    order: Literal["pool-mean", "mean-pool"] = "pool-mean",
) -> tuple[Tensor, Tensor]:
    """Same contract as :func:`kvevict_kernels.window_scores.window_scores`, slow and obvious."""
    window_size, num_qo_heads, _ = queries.shape
    num_keys, num_kv_heads = token_slots.numel(), k_buffer.shape[1]
    group_size = num_qo_heads // num_kv_heads
    pooled = torch.zeros(num_kv_heads, num_keys, dtype=torch.float32, device=queries.device)
    mean = torch.zeros_like(pooled)
    for w in range(window_size):
        for qo_head in range(num_qo_heads):
            kv_head = qo_head // group_size
            keys = k_buffer[token_slots, kv_head].float()  # [N, head_dim]
            row = torch.exp(sm_scale * (keys @ queries[w, qo_head].float()) - lse[w, qo_head])
            for n in range(num_keys):
                if key_start + n > query_start + w:
                    row[n] = 0.0
            mean[kv_head] += row / (window_size * group_size)
            pooled[kv_head] += _pool(row, kernel_size, pooling) / (window_size * group_size)
    if order == "mean-pool":
        pooled = torch.stack([_pool(row, kernel_size, pooling) for row in mean])
    return pooled, mean


def _pool(row: Tensor, kernel_size: int, pooling: str) -> Tensor:
    out = torch.empty_like(row)
    for n in range(row.numel()):
        window = row[max(0, n - kernel_size // 2) : n + kernel_size // 2 + 1]
        out[n] = window.max() if pooling == "max" else window.sum() / kernel_size
    return out
