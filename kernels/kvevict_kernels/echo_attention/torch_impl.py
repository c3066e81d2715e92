"""echo_attention as calls of PyTorch, block by block, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from kvevict_kernels.rotary import Rotary
from kvevict_kernels.stored_rows import gather_rows


def echo_attention_torch(
    queries: Tensor,
    k_buffer: Tensor,
    token_slots: Tensor,
    *,
    sm_scale: float,
    key_start: int,
    query_start: int,
    rotary: Rotary,
    k_scale: float,
    block: int,
    num_blocks: int,
    num_sinks: int,
    heads_at_once: int,
) -> Tensor:
    """Run :func:`kvevict_kernels.echo_attention.echo_attention` on checked arguments.

    ``heads_at_once`` KV heads go into one product: on a CPU 1, which fits the caches; on a GPU all, in one launch.
    """
    num_queries, num_qo_heads, head_dim = queries.shape
    num_kv_heads, num_keys = k_buffer.shape[1], token_slots.numel()
    group = num_qo_heads // num_kv_heads
    peaks = torch.zeros(num_kv_heads, num_keys, device=queries.device)
    query_end, reach = query_start + num_queries, num_blocks * block
    for first in range(query_start - query_start % block, query_end, block):
        rows = queries[max(first - query_start, 0) : first + block - query_start]
        low, high = max(first + block - reach - key_start, 0), min(first + block - key_start, num_keys)
        sinks = min(num_sinks, low)
        slots = torch.cat([token_slots[:sinks], token_slots[low:high]])
        keys = gather_rows(k_buffer, slots, k_scale).float()
        moved = rotary.advance(rows, reach).view(-1, num_kv_heads, group, head_dim)
        moved = moved.transpose(0, 1).reshape(num_kv_heads, -1, head_dim)
        parts = (torch.split(x, heads_at_once) for x in (moved.mul_(sm_scale), keys.permute(1, 2, 0)))
        weights = torch.cat([torch.bmm(x, y).softmax(-1).amax(1) for x, y in zip(*parts, strict=True)])
        for place, part in ((slice(0, sinks), slice(0, sinks)), (slice(low, high), slice(sinks, None))):
            peaks[:, place] = torch.maximum(peaks[:, place], weights[:, part])
    return peaks
