"""Attention that a prompt would pay itself if it were read once more, without the forward pass that reads it."""

from __future__ import annotations

import torch
from torch import Tensor

from kvevict_kernels.stored_rows import gather_rows
from sgl_kvevict.policies.rotary import Rotary

BLOCK = 256
"""Positions that echo together (tokens)."""
NUM_BLOCKS = 4
"""Blocks that a block attends to: itself and those before it."""
NUM_SINKS = 4
"""First keys of the range that every block sees too: attention that finds nothing rests there (tokens)."""


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
) -> Tensor:
    """Largest attention that each key would get from its neighbourhood, read a second time.

    While a prompt is prefilled, a token is seen by what happens to follow it, never by a question about it. Its own
    queries know better: moved behind the keys, a token's query looks for what continues it, as it would if the model
    repeated the text. So queries are rotated ``NUM_BLOCKS * BLOCK`` positions further and attend to the blocks around
    them without a causal mask. Nothing depends on the length of the prompt, and the cost grows linearly with it.

    Args:
        queries: [n, num_qo_heads, head_dim], after RoPE, of consecutive tokens.
        k_buffer: [num_token_slots, num_kv_heads, head_dim], keys of one layer, after RoPE.
        token_slots: [num_keys], int64, slots of consecutive tokens, up to the last query's at least.
        sm_scale: softmax scale.
        key_start: logical position of the first key (tokens).
        query_start: logical position of the first query (tokens).
        rotary: the model's rotary embedding.
        k_scale: what a stored 1 of ``k_buffer`` is worth, if it holds float8.

    Returns:
        [num_kv_heads, num_keys], float32, the maximum over queries and over the query heads of a group; 0 for keys
        that none of these queries look at. Maxima of several chunks of queries combine.

    Source: a scheme of this project, after KVzip's repetition (arXiv 2505.23416), Sec. 3, without its forward passes.
    Cost: NUM_BLOCKS * BLOCK * head_dim products per query and head, in float32.
    """
    num_queries, num_qo_heads, head_dim = queries.shape
    num_kv_heads, num_keys = k_buffer.shape[1], token_slots.numel()
    group = num_qo_heads // num_kv_heads
    peaks = torch.zeros(num_kv_heads, num_keys, device=queries.device)
    heads_at_once = 1 if queries.device.type == "cpu" else num_kv_heads  # what fits the caches; what is one launch
    query_end, reach = query_start + num_queries, NUM_BLOCKS * BLOCK
    for block in range(query_start - query_start % BLOCK, query_end, BLOCK):
        rows = queries[max(block - query_start, 0) : block + BLOCK - query_start]
        low, high = max(block + BLOCK - reach - key_start, 0), min(block + BLOCK - key_start, num_keys)
        num_sinks = min(NUM_SINKS, low)
        slots = torch.cat([token_slots[:num_sinks], token_slots[low:high]])
        keys = gather_rows(k_buffer, slots, k_scale).float()
        moved = rotary.advance(rows, reach).view(-1, num_kv_heads, group, head_dim)
        moved = moved.transpose(0, 1).reshape(num_kv_heads, -1, head_dim)
        parts = (torch.split(x, heads_at_once) for x in (moved.mul_(sm_scale), keys.permute(1, 2, 0)))
        weights = torch.cat([torch.bmm(x, y).softmax(-1).amax(1) for x, y in zip(*parts, strict=True)])
        for place, part in ((slice(0, num_sinks), slice(0, num_sinks)), (slice(low, high), slice(num_sinks, None))):
            peaks[:, place] = torch.maximum(peaks[:, place], weights[:, part])
    return peaks
