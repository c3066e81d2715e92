"""Attention weights of a few queries, row by row."""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_kvevict.policies.observation import LayerObservation, QueryWindow


def window_logits(observation: LayerObservation, window: QueryWindow) -> Tensor:
    """Sum over the window of its queries' plain dot products with the range's keys, averaged over each group.

    Returns:
        [num_kv_heads, num_tokens], float32, neither scaled nor masked.
    """
    keys = observation.keys.float().permute(1, 2, 0)  # [H, D, N]
    grouped = window.queries.float().sum(0).view(observation.num_kv_heads, -1, keys.shape[1])
    return (grouped.mean(1, keepdim=True) @ keys).squeeze(1)


def window_rows(observation: LayerObservation, window: QueryWindow) -> Tensor:
    """True attention weights of each query of the window, averaged over the query heads of a group.

    One query head of each group at a time: memory is one block of rows per KV head, not per query head.

    Returns:
        [num_kv_heads, window, num_tokens], float32; 0 where a key lies after the query.
    """
    keys = observation.keys.float().permute(1, 2, 0)  # [H, D, N]
    size, num_qo_heads, head_dim = window.queries.shape
    num_heads = observation.num_kv_heads
    group_size = num_qo_heads // num_heads
    queries = (window.queries.float() * observation.sm_scale).view(size, num_heads, group_size, head_dim)
    lse = window.lse.view(size, num_heads, group_size)
    rows = torch.zeros(num_heads, size, keys.shape[-1], device=keys.device)
    for member in range(group_size):
        logits = queries[:, :, member].transpose(0, 1) @ keys
        rows += logits.sub_(lse[:, :, member].T.unsqueeze(-1)).exp_()
    key_positions = observation.start + torch.arange(keys.shape[-1], device=keys.device)
    query_positions = window.start + torch.arange(size, device=keys.device)
    return rows.div_(group_size).masked_fill_(key_positions > query_positions[:, None], 0.0)
