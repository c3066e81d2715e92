"""How much the last queries of a prompt attend to every earlier key: scores of SnapKV and descendants."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from kvevict_kernels.checks import check_int, check_scoring, check_tensor
from kvevict_kernels.device_limits import limits_of
from kvevict_kernels.dispatch import backend_for
from kvevict_kernels.window_scores.cpu import window_scores_cpu
from kvevict_kernels.window_scores.pooling import Pooling, largest_kernel_size
from kvevict_kernels.window_scores.reference import window_scores_reference

__all__ = ["window_scores", "window_scores_reference"]


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
    """Average attention weights of a window of queries on a range of keys, per KV head.

    ``p[w, hq, n] = exp(sm_scale * q[w, hq] . k[n, hq // group_size] - lse[w, hq])``, or 0 where key position
    ``key_start + n`` > query position ``query_start + w``. Because ``lse`` covers every key that the query
    saw, ``p`` is the true attention weight: what falls on keys outside the range is missing from a row's sum,
    not renormalised.

    Pooling runs along the keys with stride 1 and keeps the length; the range's edges are the window's edges,
    also where keys go on beyond them. "max" pads with -inf (the maximum over the real positions). "avg" pads
    with zeros that count (every sum is divided by ``kernel_size``), as SnapKV and kvpress do; it commutes
    with the mean, so ``order`` changes nothing but rounding there and the mean is pooled.

    Args:
        queries: [W, num_qo_heads, head_dim], bfloat16, float16 or float32, after RoPE; W >= 1.
        lse: [W, num_qo_heads], float32, natural log-sum-exp of each query's scaled scores over all its keys.
        k_buffer: [num_token_slots, num_kv_heads, head_dim], dtype of ``queries`` or float8_e4m3fn: keys of one
            layer, after RoPE.
        token_slots: [N], int64, slots of the range in order of position; N may be 0.
        sm_scale: softmax scale; for float8 times what a stored 1 is worth.
        key_start: logical position of the range's first key (tokens).
        query_start: logical position of ``queries[0]`` (tokens).
        kernel_size: pooling window, odd, up to 127; 1 does not pool (tokens).
        pooling: "max" or "avg".
        order: "pool-mean" pools every query's row and averages then (Ada-KV's Algorithm 2); "mean-pool" pools
            the average (the authors' code, SnapKV).

    Returns:
        pooled [num_kv_heads, N] and mean [num_kv_heads, N] (not pooled: the tie-breaker), float32, two
        tensors.

    Raises:
        ValueError: wrong shape, dtype, device or choice; W == 0; an even or too large ``kernel_size`` (on a device
            also one whose tile does not fit its shared memory); query
            heads that are not a multiple of the KV heads; on the CPU also a token slot outside the buffer.

    Source: Ada-KV, arXiv 2407.11550, Algorithm 2 lines 3-4; SnapKV, arXiv 2404.14469.
    Differs: lines 3-4 say softmax over the keys outside the window; this is the softmax over all keys, then
        sliced.
    Cost: O(W * num_qo_heads * N * head_dim), float32 sums; no host sync on a device; deterministic, no
        atomics.
    """
    check_scoring(queries, k_buffer, token_slots, sm_scale=sm_scale, key_start=key_start, query_start=query_start)
    check_tensor("lse", lse, tuple(queries.shape[:2]), torch.float32, queries.device)
    if queries.shape[0] == 0:
        raise ValueError("queries: expected at least one query, got W = 0")
    pool = Pooling(kernel_size, pooling, order)
    if token_slots.numel() == 0:
        empty = queries.new_empty(k_buffer.shape[1], 0, dtype=torch.float32)
        return empty, empty.clone()
    first_key = key_start - query_start
    if backend_for(queries.device) == "cpu":
        return window_scores_cpu(queries, lse, k_buffer, token_slots, sm_scale, first_key, pool)
    if pool.pools_rows:
        check_int("kernel_size", kernel_size, 1, largest_kernel_size(queries.shape[2], limits_of(queries.device)))
    from kvevict_kernels.window_scores.triton_impl import window_scores_triton

    return window_scores_triton(queries, lse, k_buffer, token_slots, sm_scale, first_key, pool)
