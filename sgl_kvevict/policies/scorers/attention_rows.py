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
    """Attention weights of each query of the window on the range's tokens; see :func:`attention_rows`."""
    return attention_rows(observation.keys, observation.start, window, observation.sm_scale)


def rows_after_range(observation: LayerObservation, window: QueryWindow) -> Tensor:
    """Attention weights of each query of the window on the window's own tokens that lie behind the range.

    Raises:
        ValueError: the window has no keys.
    """
    if window.keys is None:
        raise ValueError(f"the window's keys of layer {observation.layer} are needed, got none")
    first = max(observation.start + observation.num_tokens - window.start, 0)
    return attention_rows(window.keys[first:], window.start + first, window, observation.sm_scale)


def attention_rows(token_keys: Tensor, key_start: int, window: QueryWindow, sm_scale: float) -> Tensor:
    """True attention weights of each query of the window, averaged over the query heads of a group.

    One query head of each group at a time: memory is one block of rows per KV head, not per query head.

    Args:
        token_keys: [num_tokens, num_kv_heads, head_dim], keys of consecutive tokens.
        key_start: logical position of the first of them.
        window: the queries.
        sm_scale: factor of the logits.

    Returns:
        [num_kv_heads, window, num_tokens], float32; 0 where a key lies after the query.
    """
    keys = token_keys.float().permute(1, 2, 0)  # [H, D, N]
    size, num_qo_heads, head_dim = window.queries.shape
    num_heads = keys.shape[0]
    group_size = num_qo_heads // num_heads
    queries = (window.queries.float() * sm_scale).view(size, num_heads, group_size, head_dim)
    lse = window.lse.view(size, num_heads, group_size)
    rows = torch.zeros(num_heads, size, keys.shape[-1], device=keys.device)
    for member in range(group_size):
        logits = queries[:, :, member].transpose(0, 1) @ keys
        rows += logits.sub_(lse[:, :, member].T.unsqueeze(-1)).exp_()
    key_positions = key_start + torch.arange(keys.shape[-1], device=keys.device)
    query_positions = window.start + torch.arange(size, device=keys.device)
    return rows.div_(group_size).masked_fill_(key_positions > query_positions[:, None], 0.0)
