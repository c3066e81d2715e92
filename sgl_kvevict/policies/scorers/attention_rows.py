"""Attention weights of a few queries, row by row."""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_kvevict.policies.observation import LayerObservation, QueryWindow


def window_logits(observation: LayerObservation, window: QueryWindow) -> Tensor:
    """Plain dot products of the window's queries with the range's keys.

    Returns:
        [num_kv_heads, group_size, window, num_tokens], float32, neither scaled nor masked.
    """
    keys = observation.keys.float().permute(1, 2, 0)[:, None]  # [H, 1, D, N]
    size, _, head_dim = window.queries.shape
    grouped = window.queries.float().view(size, observation.num_kv_heads, -1, head_dim)
    return grouped.permute(1, 2, 0, 3) @ keys


def window_rows(observation: LayerObservation, window: QueryWindow) -> Tensor:
    """True attention weights of each query of the window, averaged over the query heads of a group.

    Returns:
        [num_kv_heads, window, num_tokens], float32; 0 where a key lies after the query.
    """
    logits = window_logits(observation, window)
    num_heads, group_size, size, num_tokens = logits.shape
    lse = window.lse.T.reshape(num_heads, group_size, size, 1)
    rows = logits.mul_(observation.sm_scale).sub_(lse).exp_().mean(1)
    device = rows.device
    keys = observation.start + torch.arange(num_tokens, device=device)
    queries = window.start + torch.arange(size, device=device)
    return rows.masked_fill_(keys > queries[:, None], 0.0)
