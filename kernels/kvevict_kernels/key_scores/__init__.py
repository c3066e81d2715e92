"""Attention weights of queries on keys, reduced over the queries in several ways."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

from kvevict_kernels.checks import FP8, KV_DTYPES, check_choice, check_index_range, check_int, check_tensor
from kvevict_kernels.device_limits import DeviceLimits, limits_of
from kvevict_kernels.dispatch import implementation
from kvevict_kernels.stored_rows import gather_rows

__all__ = ["accumulated_attention", "largest_kernel_size", "pools_rows", "window_scores"]

KEYS_PER_TILE = 128
EARLIER_KEYS_PER_TILE = 1024
"""Where all keys precede all queries, so that nothing is masked: fewer, larger products and fewer thread wake-ups."""
MOST_KEYS_PER_TILE = 4096
"""Where all queries fit beside so many keys: those of a window."""
WEIGHTS_PER_TILE = 2**19
"""Attention weights in memory at a time, 4 to 6 bytes each: they fit the caches."""
LSE_COLUMNS = {torch.bfloat16: 2, torch.float32: 1}
"""Columns that sum to the log-sum-exp, by the product's dtype: two of bfloat16 hold it to 2**-17 of its size."""
LOG2_E = math.log2(math.e)
MAX_KERNEL_SIZE = 127
"""A tile of keys on the device must contain a whole pooling window."""
KEY_BLOCK = 128
"""Keys of a tile on a device, halo included; twice as many where the window leaves less than ``MIN_VALID_KEYS``."""
MIN_VALID_KEYS = 32
"""Keys of a tile that are not halo, at least."""
WIDE_ROW_SHARED = 155648
"""Bytes of shared memory of a program with the larger tile where rows are 256 numbers wide (compiled)."""
MAX_HEAD_DIM = 256
"""Wider rows are latents, of up to 576 numbers."""
LATENT_KEYS = 64
"""Keys of a tile of latents, halo included."""


def accumulated_attention(
    queries: Tensor,
    lse: Tensor,
    k_buffer: Tensor,
    token_slots: Tensor,
    *,
    sm_scale: float,
    key_start: int,
    query_start: int,
    reduction: Literal["sum", "squares"] = "sum",
) -> Tensor:
    """Reduce attention weights over queries and over the query heads of each KV head, per key.

    ``p[i, hq, j] = exp(sm_scale * q[i, hq] . k[j, hq // group_size] - lse[i, hq])``, or 0 where key position
    ``key_start + j`` > query position ``query_start + i``. ``lse`` covers every key that the query saw, so ``p`` is the
    true attention weight, not renormalised over the given keys. Calls may split the queries (chunks of a prefill) or
    the keys: sums add up.

    Args:
        queries: [n, num_qo_heads, head_dim], bfloat16, float16 or float32, after RoPE; n may be 0.
        lse: [n, num_qo_heads], float32, natural log-sum-exp of each query's scaled scores over all its keys.
        k_buffer: [num_token_slots, num_kv_heads, head_dim], one of these dtypes or float8_e4m3fn: keys of one layer,
            after RoPE.
        token_slots: [N], int64, slots of the keys in order of position; N may be 0.
        sm_scale: softmax scale; for float8 multiplied by the layer's scale of keys.
        key_start: logical position of the first key (tokens).
        query_start: logical position of ``queries[0]`` (tokens).
        reduction: "sum" over queries, mean over a group; or "squares", summed over both.

    Returns:
        [num_kv_heads, N], float32; 0 for keys after the last query.

    Raises:
        ValueError: wrong shape, dtype, device or reduction; query heads that are not a multiple of the KV heads; on the
            CPU also a token slot outside the buffer.

    Source: sums: H2O, arXiv 2306.14048, Sec. 4; D2O, arXiv 2406.13035, Eq. 4 and 6. Squares: this project.
    Differs: H2O and D2O accumulate during generation; this is the sum over the prompt.
    Cost: O(num_qo_heads * head_dim) per (query, visible key); float32 sums; never an n x N matrix; no host sync on a
        device; deterministic, no atomics.
    """
    _check(queries, lse, k_buffer, token_slots, sm_scale, key_start, query_start)
    check_choice("reduction", reduction, ("sum", "squares"))
    first_key = key_start - query_start
    num_queries = queries.shape[0]
    # No key that a query sees.
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
    """Average attention weights of a window of queries on a range of keys, per KV head (SnapKV and its descendants).

    Weights, and the arguments not listed here, are those of :func:`accumulated_attention`; at least one query is
    needed. Pooling runs along the keys with stride 1 and keeps the length; it ends at the range's edges, even if more
    keys follow.

    * ``kernel_size``: pooling window (tokens), odd, up to 127; 1 does not pool.
    * ``pooling``: "max" pads with -inf; "avg" pads with zeros that count (every sum is divided by ``kernel_size``), as
      SnapKV and kvpress do.
    * ``order``: "pool-mean" pools every query's row, then averages (Ada-KV's Algorithm 2); "mean-pool" pools the
      average (the authors' code, SnapKV). No effect with "avg", which commutes with the mean.

    Returns:
        pooled [num_kv_heads, N] and mean [num_kv_heads, N] (not pooled: the tie-breaker), float32, two tensors.

    Raises:
        ValueError: as for :func:`accumulated_attention`; no query; an even or too large ``kernel_size`` (on a device
            also one whose tile does not fit its shared memory).

    Source: Ada-KV, arXiv 2407.11550, Algorithm 2 lines 3-4; SnapKV, arXiv 2404.14469.
    Differs: lines 3-4 say softmax over the keys outside the window; this is the softmax over all keys, then sliced.
    Cost: as :func:`accumulated_attention`.
    """
    _check(queries, lse, k_buffer, token_slots, sm_scale, key_start, query_start)
    if queries.shape[0] == 0:
        raise ValueError("queries: expected at least one query, got W = 0")
    check_int("kernel_size", kernel_size, 1, MAX_KERNEL_SIZE)
    if kernel_size % 2 == 0:
        raise ValueError(f"kernel_size: expected an odd number, got {kernel_size}")
    check_choice("pooling", pooling, ("max", "avg"))
    check_choice("order", order, ("pool-mean", "mean-pool"))
    if token_slots.numel() == 0:
        empty = queries.new_empty(k_buffer.shape[1], 0, dtype=torch.float32)
        return empty, empty.clone()
    rows_kernel = kernel_size if pools_rows(kernel_size, pooling, order) else 1
    if rows_kernel > 1 and queries.is_cuda:
        check_int("kernel_size", kernel_size, 1, largest_kernel_size(queries.shape[2], limits_of(queries.device)))
    run = implementation(queries.device, key_scores_cpu, "key_scores")
    mean, pooled = run(queries, lse, k_buffer, token_slots, sm_scale, key_start - query_start, "mean", rows_kernel)
    return (_pool(mean, kernel_size, pooling) if pooled is None else pooled), mean


def _check(
    queries: Tensor,
    lse: Tensor,
    k_buffer: Tensor,
    token_slots: Tensor,
    sm_scale: float,
    key_start: int,
    query_start: int,
) -> None:
    """Require the arguments that both operations have."""
    check_tensor("queries", queries, (None, None, None), KV_DTYPES)
    num_qo_heads, head_dim = queries.shape[1:]
    check_tensor("k_buffer", k_buffer, (None, None, head_dim), (*KV_DTYPES, FP8), queries.device)
    check_tensor("token_slots", token_slots, (None,), torch.int64, queries.device)
    num_kv_heads = k_buffer.shape[1]
    if num_kv_heads == 0 or num_qo_heads == 0 or num_qo_heads % num_kv_heads:
        raise ValueError(f"queries: expected a multiple of {num_kv_heads} KV heads, got {num_qo_heads} heads")
    if not math.isfinite(sm_scale) or sm_scale <= 0:
        raise ValueError(f"sm_scale: expected a finite number > 0, got {sm_scale!r}")
    check_int("key_start", key_start, 0)
    check_int("query_start", query_start, 0)
    check_index_range("token_slots", token_slots, k_buffer.shape[0])
    check_tensor("lse", lse, tuple(queries.shape[:2]), torch.float32, queries.device)


def largest_kernel_size(head_dim: int, limits: DeviceLimits) -> int:
    """Widest window that a device can pool row by row: the larger tile of wide rows does not fit an sm_89."""
    if head_dim > MAX_HEAD_DIM:
        return LATENT_KEYS - MIN_VALID_KEYS - 1
    if head_dim <= KEY_BLOCK or limits.shared_per_block >= WIDE_ROW_SHARED:
        return MAX_KERNEL_SIZE
    return KEY_BLOCK - MIN_VALID_KEYS - 1


def pools_rows(kernel_size: int, pooling: str, order: str) -> bool:
    """Whether :func:`window_scores` must pool rows one by one; otherwise pooling their mean is the same."""
    return kernel_size > 1 and pooling == "max" and order == "pool-mean"


def _pool(x: Tensor, kernel_size: int, pooling: str) -> Tensor:
    """Pool the last dimension of [rows, keys]. Returns a new float32 tensor of the same shape."""
    if kernel_size == 1:
        return x.clone()
    halo = kernel_size // 2
    if pooling == "max":
        return max_pool1d(x[None], kernel_size, stride=1, padding=halo)[0]
    return avg_pool1d(x[None], kernel_size, stride=1, padding=halo, count_include_pad=True)[0]


def key_scores_cpu(
    queries: Tensor,
    lse: Tensor,
    k_buffer: Tensor,
    token_slots: Tensor,
    sm_scale: float,
    first_key: int,
    reduction: str,
    kernel_size: int = 1,
) -> tuple[Tensor, Tensor | None]:
    """CPU path, one tile of queries and keys at a time.

    The product itself yields the exponents ``log2(p) = sm_scale * log2(e) * (q . k - lse / sm_scale)``: query rows
    carry ``-lse / sm_scale`` in additional columns, where keys hold ones, and the factor is the product's ``alpha``.
    Base 2, because PyTorch's exp2 is four times as fast as its exp where MKL computes the latter on another vendor's
    processor.

    Sums of bfloat16 inputs use bfloat16 products where the processor has them. These round the exponents (not the
    scores) to 8 bits: weights near 1 are exact, a weight of 2**-10 is off by up to 2.2 %, to either side. All other
    reductions use float32 products: they have few queries, and rounded exponents would make ties among keys that a
    selection must order.

    ``first_key`` is the position of the first key relative to the first query (tokens). ``reduction`` may also be
    "mean", over queries and group. ``kernel_size`` is the window of the max pooling of each row; 1: none. Queries
    before a tile's first key are skipped, and keys after a tile's last query.

    Returns:
        reduced weights [num_kv_heads, N], float32, and the mean of the pooled rows, likewise; None without pooling.
    """
    (num_queries, num_qo_heads, _), num_kv_heads, num_keys = queries.shape, k_buffer.shape[1], token_slots.numel()
    group_size, halo = num_qo_heads // num_kv_heads, kernel_size // 2
    num_seen = min(num_queries - first_key + halo, num_keys)
    is_masked, room = first_key + num_seen > 0, WEIGHTS_PER_TILE // (num_qo_heads * num_queries)
    # Masked: small tiles, of which few are half seen, unless all queries fit with larger ones.
    tile_keys = min(max(room, KEYS_PER_TILE if is_masked else EARLIER_KEYS_PER_TILE), MOST_KEYS_PER_TILE)
    out = torch.zeros(num_kv_heads, 1, num_keys)
    pooled = torch.zeros_like(out) if halo else None
    dtype = _product_dtype(queries.dtype) if reduction == "sum" else torch.float32
    tiles = []
    for start in range(0, num_seen, tile_keys):
        # A pooling window reaches into the neighbouring tiles.
        low, end = start - halo if start else 0, start + tile_keys
        tiles += [(start, low, end, _key_columns(gather_rows(k_buffer, token_slots[low : end + halo]), dtype))]
    tile_queries = min(WEIGHTS_PER_TILE // (num_qo_heads * tile_keys) or 1, num_queries)
    # One buffer for all tiles: memory that is touched again is in the caches.
    buffer = torch.empty(num_qo_heads * tile_queries * (tile_keys + 2 * halo))
    # Rows are summed by a product with ones, which adds to ``part`` without a temporary.
    ones = torch.ones(num_kv_heads, 1, tile_queries * group_size)
    for begin in range(0, num_queries, tile_queries):
        tile = slice(begin, begin + tile_queries)
        rows = _query_rows(queries[tile], lse[tile] / -sm_scale, num_kv_heads, dtype)
        for start, low, end, columns in tiles:
            ahead = first_key + low - begin  # of the tile's first query
            blind = ahead if ahead > 0 else 0  # queries before the tile's first key
            seeing = rows[:, blind * group_size :]
            # Tiles ascend: later ones begin still further on.
            if seeing.shape[1] == 0:
                break
            exponents = _exponents(seeing, columns, sm_scale, group_size, ahead - blind, buffer)
            part = out[..., start:end]
            weights = (exponents.mul_(2.0) if reduction == "squares" else exponents).exp2_()
            inside = slice(start - low, end - low)
            part.baddbmm_(ones[..., : weights.shape[1]], weights[..., inside])
            if pooled is not None:
                peaks = max_pool1d(weights, kernel_size, stride=1, padding=halo)[..., inside]
                pooled[..., start:end] += peaks.sum(1, keepdim=True)
    norm = {"sum": group_size, "squares": 1, "mean": group_size * num_queries}[reduction]
    return out[:, 0].div_(norm), None if pooled is None else pooled[:, 0].div_(norm)


def _exponents(
    rows: Tensor, columns: Tensor, sm_scale: float, group_size: int, first_key: int, buffer: Tensor
) -> Tensor:
    """Base-2 logarithms of the attention weights of a tile, [num_kv_heads, rows, keys], float32, in ``buffer``.

    ``rows`` are from :func:`_query_rows`, ``columns`` from :func:`_key_columns`. ``first_key`` is the position of the
    first key relative to the first query, <= 0 (tokens).
    """
    (num_kv_heads, num_rows, _), num_keys = rows.shape, columns.shape[2]
    shape = (num_kv_heads, num_rows, num_keys)
    p = buffer[: num_kv_heads * num_rows * num_keys].view(shape)
    product = p if rows.dtype == p.dtype else torch.empty(shape, dtype=rows.dtype)
    torch.baddbmm(product, rows, columns, beta=0, alpha=sm_scale * LOG2_E, out=product)
    if product is not p:
        p.copy_(product)
    # Rows from the last key on see all keys, and need no mask.
    masked = min(num_rows // group_size, first_key + num_keys - 1)  # queries before the last key
    if masked > 0:
        before = 1 - first_key  # keys that the first query sees, and so do all
        future = torch.full((masked, 1, num_keys - before), float("-inf"))
        future[:, 0].triu_()
        p.view(num_kv_heads, -1, group_size, num_keys)[:, :masked, :, before:] += future
    return p


def _query_rows(queries: Tensor, bias: Tensor, num_kv_heads: int, dtype: torch.dtype) -> Tensor:
    """Rows of the product, [num_kv_heads, num_queries * group_size, head_dim + LSE columns], in ``dtype``.

    ``queries`` is [num_queries, num_qo_heads, head_dim]; ``bias`` [num_queries, num_qo_heads] (float32) is the sum of
    the last columns.
    """
    parts, rest = [queries.to(dtype)], bias[..., None]
    for _ in range(LSE_COLUMNS[dtype]):
        parts += [rest.to(dtype)]
        # A second column takes what the first one's rounding has left.
        rest = rest - parts[-1]
    rows = torch.cat(parts, dim=-1)  # [num_queries, num_qo_heads, width]
    by_head = rows.view(rows.shape[0], num_kv_heads, -1, rows.shape[2]).transpose(0, 1)
    return by_head.reshape(num_kv_heads, -1, rows.shape[2])


def _key_columns(keys: Tensor, dtype: torch.dtype) -> Tensor:
    """Columns of the product, [num_kv_heads, head_dim + LSE columns, num_keys]; keys [num_keys, num_kv_heads, ...]."""
    num_keys, num_kv_heads, head_dim = keys.shape
    rows = torch.empty(num_kv_heads, num_keys, head_dim + LSE_COLUMNS[dtype], dtype=dtype)
    rows[..., :head_dim] = keys.transpose(0, 1)
    rows[..., head_dim:] = 1.0  # they multiply the query's columns of log-sum-exp
    return rows.transpose(1, 2)


def _product_dtype(dtype: torch.dtype) -> torch.dtype:
    """bfloat16 only where oneDNN multiplies it: PyTorch's own product would be far slower than float32."""
    if dtype == torch.bfloat16 and torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return dtype if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32
    return torch.float32
