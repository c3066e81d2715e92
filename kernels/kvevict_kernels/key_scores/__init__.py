"""Attention that queries pay to keys: one loop over queries and keys, whose weights are reduced in several ways."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from kvevict_kernels.checks import check_choice, check_int, check_scoring, check_tensor
from kvevict_kernels.device_limits import limits_of
from kvevict_kernels.dispatch import implementation
from kvevict_kernels.key_scores.cpu import key_scores_cpu
from kvevict_kernels.key_scores.pooling import Pooling, largest_kernel_size

__all__ = ["accumulated_attention", "window_scores"]


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
    ``key_start + j`` > query position ``query_start + i``. Because ``lse`` covers every key that the query saw, ``p``
    is the true attention weight: the share of keys outside the range is missing, not renormalised. So calls may split
    the queries (chunks of a prefill) or the keys: their sums add up, their maxima combine.

    Args:
        queries: [n, num_qo_heads, head_dim], bfloat16, float16 or float32, after RoPE; n may be 0.
        lse: [n, num_qo_heads], float32, natural log-sum-exp of each query's scaled scores over all its keys.
        k_buffer: [num_token_slots, num_kv_heads, head_dim], dtype of ``queries`` or float8_e4m3fn: keys of one
            layer, after RoPE.
        token_slots: [N], int64, slots of the keys in order of position; N may be 0.
        sm_scale: softmax scale; for float8 multiplied by the layer's scale of keys.
        key_start: logical position of the first key (tokens).
        query_start: logical position of ``queries[0]`` (tokens).
        reduction: "sum" over queries, mean over a group; or "squares", summed over both; or "max" over both.

    Returns:
        [num_kv_heads, N], float32; 0 for keys after the last query.

    Raises:
        ValueError: wrong shape, dtype, device or reduction; query heads that are not a multiple of the KV heads; on the
            CPU also a token slot outside the buffer.

    Source: sums: H2O, arXiv 2306.14048, Sec. 4; D2O, arXiv 2406.13035, Eq. 4 and 6. Maxima: KVzip, arXiv 2505.23416,
        Sec. 3. Squares: this project.
    Differs: H2O and D2O accumulate while they generate; this is the sum over the prompt. KVzip renormalises over the
        keys that it looks at.
    Cost: O(num_qo_heads * head_dim) per pair of a query and a key that it sees; float32 sums; never an n x N matrix; no
        host sync on a device; deterministic, no atomics.
    """
    check_scoring(queries, k_buffer, token_slots, sm_scale=sm_scale, key_start=key_start, query_start=query_start)
    check_tensor("lse", lse, tuple(queries.shape[:2]), torch.float32, queries.device)
    check_choice("reduction", reduction, ("sum", "squares", "max"))
    first_key = key_start - query_start
    num_queries = queries.shape[0]
    if min(token_slots.numel(), num_queries, num_queries - first_key) <= 0:
        return torch.zeros(k_buffer.shape[1], token_slots.numel(), dtype=torch.float32, device=queries.device)
    run = implementation(queries.device, key_scores_cpu, "key_scores")
    return run(queries, lse, k_buffer, token_slots, sm_scale, first_key, reduction)[0]


def window_scores(
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
    """Average attention weights of a window of queries on a range of keys, per KV head: SnapKV and its descendants.

    Weights are those of :func:`accumulated_attention`. Pooling runs along the keys with stride 1 and keeps the length;
    the range's edges are the window's edges, also where keys go on beyond them. "max" pads with -inf. "avg" pads with
    zeros that count (every sum is divided by ``kernel_size``), as SnapKV and kvpress do; it commutes with the mean, so
    the mean is pooled whatever ``order`` says.

    Args:
        queries: [W, num_qo_heads, head_dim], as for :func:`accumulated_attention`; W >= 1.
        lse: likewise.
        k_buffer: likewise.
        token_slots: likewise.
        sm_scale: likewise.
        key_start: likewise.
        query_start: likewise.
        kernel_size: pooling window, odd, up to 127; 1 does not pool (tokens).
        pooling: "max" or "avg".
        order: "pool-mean" pools every query's row, then averages (Ada-KV's Algorithm 2); "mean-pool" pools the average
            (the authors' code, SnapKV).

    Returns:
        pooled [num_kv_heads, N] and mean [num_kv_heads, N] (not pooled: the tie-breaker), float32, two tensors.

    Raises:
        ValueError: as for :func:`accumulated_attention`; W == 0; an even or too large ``kernel_size`` (on a device also
            one whose tile does not fit its shared memory).

    Source: Ada-KV, arXiv 2407.11550, Algorithm 2 lines 3-4; SnapKV, arXiv 2404.14469.
    Differs: lines 3-4 say softmax over the keys outside the window; this is the softmax over all keys, then sliced.
    Cost: as :func:`accumulated_attention`.
    """
    check_scoring(queries, k_buffer, token_slots, sm_scale=sm_scale, key_start=key_start, query_start=query_start)
    check_tensor("lse", lse, tuple(queries.shape[:2]), torch.float32, queries.device)
    if queries.shape[0] == 0:
        raise ValueError("queries: expected at least one query, got W = 0")
    pool = Pooling(kernel_size, pooling, order)
    if token_slots.numel() == 0:
        empty = queries.new_empty(k_buffer.shape[1], 0, dtype=torch.float32)
        return empty, empty.clone()
    rows_kernel = kernel_size if pool.pools_rows else 1
    if rows_kernel > 1 and queries.is_cuda:
        check_int("kernel_size", kernel_size, 1, largest_kernel_size(queries.shape[2], limits_of(queries.device)))
    run = implementation(queries.device, key_scores_cpu, "key_scores")
    mean, pooled = run(queries, lse, k_buffer, token_slots, sm_scale, key_start - query_start, "mean", rows_kernel)
    return (pool.pool(mean) if pooled is None else pooled), mean
