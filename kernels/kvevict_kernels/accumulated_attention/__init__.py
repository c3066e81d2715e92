"""How much attention many queries pay to every key: summed (H2O, D2O), squared and summed (readers), or at most."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from kvevict_kernels.accumulated_attention.cpu import accumulated_attention_cpu
from kvevict_kernels.accumulated_attention.reference import accumulated_attention_reference
from kvevict_kernels.checks import check_scoring, check_tensor
from kvevict_kernels.dispatch import backend_for

__all__ = ["accumulated_attention", "accumulated_attention_reference"]


def accumulated_attention(
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
    """Reduce attention weights over queries and over the query heads of each KV head, per key.

    ``p[i, hq, j] = exp(sm_scale * q[i, hq] . k[j, hq // group_size] - lse[i, hq])``, or 0 where key position
    ``key_start + j`` > query position ``query_start + i``; the result is the sum over all ``i`` and the mean over the
    query heads of a group, or over both the sum of the squares or the maximum. Because ``lse`` covers every key that
    the query saw, ``p`` is the true attention weight: what falls on keys outside the range is missing, not
    renormalised. So calls may split the queries (chunks of a prefill) or the keys, and their results add up (maxima
    combine).

    Args:
        queries: [n, num_qo_heads, head_dim], bfloat16, float16 or float32, after RoPE; n may be 0.
        lse: [n, num_qo_heads], float32, natural log-sum-exp of each query's scaled scores over all its keys.
        k_buffer: [num_token_slots, num_kv_heads, head_dim], dtype of ``queries`` or float8_e4m3fn: keys of one
            layer, after RoPE.
        token_slots: [N], int64, slots of the keys in order of position; N may be 0.
        sm_scale: softmax scale; for float8 times what a stored 1 is worth.
        key_start: logical position of the first key (tokens).
        query_start: logical position of ``queries[0]`` (tokens).
        reduction: "sum" over queries, mean over a group; or "squares", summed over both; or "max" over both.

    Returns:
        [num_kv_heads, N], float32; 0 for keys after the last query.

    Raises:
        ValueError: wrong shape, dtype or device; query heads that are not a multiple of the KV heads; on the CPU
            also a token slot outside the buffer.

    Source: sums: H2O, arXiv 2306.14048, Sec. 4; D2O, arXiv 2406.13035, Eq. 4 and 6. Maxima: KVzip,
        arXiv 2505.23416, Sec. 3. Squares: this project.
    Differs: H2O and D2O accumulate while they generate; this is the sum over the prompt. KVzip renormalises over the
        keys that it looks at.
    Cost: O(num_qo_heads * head_dim) per pair of a query and a key that it sees, none for the other pairs; float32
        sums; never an n x N matrix; no host sync on a device; deterministic, no atomics.
    """
    check_scoring(queries, k_buffer, token_slots, sm_scale=sm_scale, key_start=key_start, query_start=query_start)
    check_tensor("lse", lse, tuple(queries.shape[:2]), torch.float32, queries.device)
    if reduction not in ("sum", "squares", "max"):
        raise ValueError(f"reduction: got {reduction!r}; allowed: 'sum', 'squares', 'max'")
    num_queries, device = queries.shape[0], queries.device
    first_key = key_start - query_start
    if min(token_slots.numel(), num_queries, num_queries - first_key) <= 0:
        return torch.zeros(k_buffer.shape[1], token_slots.numel(), dtype=torch.float32, device=device)
    if backend_for(device) == "cpu":
        return accumulated_attention_cpu(queries, lse, k_buffer, token_slots, sm_scale, first_key, reduction)
    from kvevict_kernels.accumulated_attention.triton_impl import accumulated_attention_triton

    return accumulated_attention_triton(queries, lse, k_buffer, token_slots, sm_scale, first_key, reduction)
