"""Attention that a prompt would pay to itself if it were read a second time, computed without that forward pass."""

from __future__ import annotations

import torch
from torch import Tensor

from kvevict_kernels.checks import check_int, check_scoring
from kvevict_kernels.rotary import Rotary
from kvevict_kernels.stored_rows import gather_rows

__all__ = ["echo_attention"]


def echo_attention(
    queries: Tensor,
    k_buffer: Tensor,
    token_slots: Tensor,
    *,
    sm_scale: float,
    key_start: int,
    query_start: int,
    rotary: Rotary,
    k_scale: float = 1.0,
    block: int = 256,
    num_blocks: int = 4,
    num_sinks: int = 4,
) -> Tensor:
    """Largest attention that each key would get from its neighbourhood in a second reading.

    Queries are rotated ``num_blocks * block`` positions further, where the repeated text would stand. They attend
    without a causal mask to their own block of the prompt, to the ``num_blocks - 1`` blocks before it, and to the first
    ``num_sinks`` keys (attention sinks). Blocks begin at multiples of ``block``: scores do not depend on the prompt's
    length, and the cost is linear in it.

    Args:
        queries: [n, num_qo_heads, head_dim], bfloat16, float16 or float32, after RoPE, of consecutive tokens; n may be
            0.
        k_buffer: [num_token_slots, num_kv_heads, head_dim], dtype of ``queries`` or float8_e4m3fn: keys of one layer,
            after RoPE.
        token_slots: [N], int64, slots of consecutive tokens, at least up to the last query's.
        sm_scale: softmax scale.
        key_start: logical position of the first key (tokens).
        query_start: logical position of the first query (tokens).
        rotary: the model's rotary embedding.
        k_scale: FP8 scale of ``k_buffer``; not read for other dtypes.
        block: positions per block (tokens).
        num_blocks: blocks that a block attends to: itself and its predecessors.
        num_sinks: first keys that every block sees too (tokens).

    Returns:
        [num_kv_heads, N], float32, maximum over the queries and the query heads of a group; 0 for keys that no query
        sees. Results of several chunks of queries combine by maximum.

    Raises:
        ValueError: wrong shape, dtype or device; query heads that are not a multiple of the KV heads; on the CPU also a
            token slot outside the buffer.

    Source: a scheme of this project, after KVzip's repetition (arXiv 2505.23416), Sec. 3, without its forward passes.
    Cost: ``num_blocks * block * head_dim`` products per query and head, in float32; no host sync on a device;
        deterministic. The same PyTorch calls run on every device; there is no kernel.
    """
    check_scoring(queries, k_buffer, token_slots, sm_scale=sm_scale, key_start=key_start, query_start=query_start)
    check_int("block", block, 1)
    check_int("num_blocks", num_blocks, 1)
    check_int("num_sinks", num_sinks, 0)
    heads_at_once = k_buffer.shape[1] if queries.is_cuda else 1  # one KV head fits a CPU's caches
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
