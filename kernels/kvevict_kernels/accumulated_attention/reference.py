"""The definition of accumulated_attention, one query row and one key at a time, in float32."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor


def accumulated_attention_reference(
    queries: Tensor,
    lse: Tensor,
    k_buffer: Tensor,
    token_slots: Tensor,
    *,
    sm_scale: float,
    key_start: int,
    query_start: int,
    reduction: Literal["sum", "squares", "max"] = "sum",
) -> Tensor:
    """Same contract as :func:`kvevict_kernels.accumulated_attention.accumulated_attention`, slow and obvious."""
    num_queries, num_qo_heads, _ = queries.shape
    num_keys, num_kv_heads = token_slots.numel(), k_buffer.shape[1]
    group_size = num_qo_heads // num_kv_heads
    out = torch.zeros(num_kv_heads, num_keys, dtype=torch.float32, device=queries.device)
    for qo_head in range(num_qo_heads):
        kv_head = qo_head // group_size
        keys = k_buffer[token_slots, kv_head].float()  # [N, head_dim]
        for i in range(num_queries):
            row = torch.exp(sm_scale * (keys @ queries[i, qo_head].float()) - lse[i, qo_head])
            num_seen = max(0, query_start + i + 1 - key_start)  # keys up to the query's own position
            row[num_seen:] = 0.0
            if reduction == "max":
                out[kv_head] = torch.maximum(out[kv_head], row)
            else:
                out[kv_head] += row / group_size if reduction == "sum" else row**2
    return out
