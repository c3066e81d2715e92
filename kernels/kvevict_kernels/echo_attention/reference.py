"""The definition of echo_attention, one query row at a time, in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from kvevict_kernels.rotary import Rotary
from kvevict_kernels.stored_rows import gather_rows


def echo_attention_reference(
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
    """Same contract as :func:`kvevict_kernels.echo_attention.echo_attention`, slow and obvious.

    A query is turned back to position 0 and from there to where a second copy of its token would stand.
    """
    num_queries, num_qo_heads, _ = queries.shape
    num_keys, num_kv_heads = token_slots.numel(), k_buffer.shape[1]
    reach = num_blocks * block
    out = torch.zeros(num_kv_heads, num_keys, dtype=torch.float32, device=queries.device)
    keys = gather_rows(k_buffer, token_slots, k_scale).float()
    for i in range(num_queries):
        position = torch.tensor([query_start + i], device=queries.device)
        plain = rotary.apply(queries[i : i + 1], position, inverse=True)
        query = rotary.apply(plain, position + reach)[0]
        own_block = (query_start + i) // block * block
        near = range(own_block + block - reach - key_start, own_block + block - key_start)
        seen = sorted({j for j in (*range(num_sinks), *near) if 0 <= j < num_keys})
        for qo_head in range(num_qo_heads):
            kv_head = qo_head * num_kv_heads // num_qo_heads
            row = (sm_scale * (keys[seen, kv_head] @ query[qo_head])).softmax(0)
            out[kv_head, seen] = torch.maximum(out[kv_head, seen], row)
    return out
