"""key_scores in vectorised torch, a tile of queries and keys at a time.

The product itself yields the exponents ``log2(p) = sm_scale * log2(e) * (q . k - lse / sm_scale)``: query rows carry
``-lse / sm_scale`` in additional columns, where keys hold ones, and the factor is the product's ``alpha``. Base 2,
because PyTorch's exp2 is four times as fast as its exp where MKL computes the latter on another vendor's processor.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d

from kvevict_kernels.stored_rows import gather_rows

KEYS_PER_TILE = 128
EARLIER_KEYS_PER_TILE = 1024
"""Where all keys come before all queries, so that nothing is masked: fewer and larger products, fewer wake-ups."""
WEIGHTS_PER_TILE = 2**19
"""Attention weights in memory at a time, at 4 to 6 bytes each: they fit the caches."""
LSE_COLUMNS = {torch.bfloat16: 2, torch.float32: 1}
"""The log-sum-exp as a sum of values of the product's dtype: two of bfloat16 hold it to 2**-17 of its size."""
LOG2_E = math.log2(math.e)


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
    """CPU path of :mod:`kvevict_kernels.key_scores`.

    Sums of bfloat16 inputs are taken of bfloat16 products where the processor has them, which rounds the exponents (not
    the scores) to 8 bits: weights near 1 are exact, a weight of 2**-10 is off by up to 2.2 %, to either side. All other
    reductions take float32 products: they have few queries, and rounded exponents would make ties among keys
    that a selection must order. Queries before a tile's first key are left out, and keys after a tile's last query.

    Args:
        queries: see :func:`kvevict_kernels.key_scores.accumulated_attention`, and likewise:
        lse: float32.
        k_buffer: keys of a layer.
        token_slots: slots of the keys.
        sm_scale: softmax scale.
        first_key: position of the first key relative to the first query (tokens).
        reduction: "sum", "squares", "max", or "mean" over queries and group.
        kernel_size: keys over which the weights of every row are pooled (maximum); 1: not at all.

    Returns:
        reduced weights [num_kv_heads, N], float32, and the mean of the pooled rows, likewise; None without pooling.
    """
    (num_queries, num_qo_heads, _), num_kv_heads, num_keys = queries.shape, k_buffer.shape[1], token_slots.numel()
    group_size, halo = num_qo_heads // num_kv_heads, kernel_size // 2
    num_seen = min(num_keys, num_queries - first_key + halo)
    tile_keys = EARLIER_KEYS_PER_TILE
    if first_key + num_seen > 0:  # some keys are masked: small tiles, unless all queries fit beside larger ones
        tile_keys = max(KEYS_PER_TILE, min(tile_keys, WEIGHTS_PER_TILE // (num_qo_heads * num_queries)))
    out = torch.full((num_kv_heads, 1, num_keys), float("-inf") if reduction == "max" else 0.0)
    pooled = torch.zeros_like(out) if halo else None
    dtype = _product_dtype(queries.dtype) if reduction == "sum" else torch.float32
    tiles = []
    for start in range(0, num_seen, tile_keys):
        low, end = start - halo if start else 0, start + tile_keys
        tiles.append((start, low, end, _key_columns(gather_rows(k_buffer, token_slots[low : end + halo]), dtype)))
    tile_queries = WEIGHTS_PER_TILE // (num_qo_heads * tile_keys) or 1
    if tile_queries > num_queries:
        tile_queries = num_queries
    buffer = torch.empty(num_qo_heads * tile_queries * (tile_keys + 2 * halo))
    ones = torch.ones(num_kv_heads, 1, tile_queries * group_size)
    for begin in range(0, num_queries, tile_queries):
        tile = slice(begin, begin + tile_queries)
        rows = _query_rows(queries[tile], lse[tile] / -sm_scale, num_kv_heads, dtype)
        for start, low, end, columns in tiles:
            ahead = first_key + low - begin  # of the tile's first query
            blind = ahead if ahead > 0 else 0  # queries before the tile's first key
            seeing = rows[:, blind * group_size :]
            if seeing.shape[1] == 0:
                break
            exponents = _exponents(seeing, columns, sm_scale, group_size, ahead - blind, buffer)
            part = out[..., start:end]
            if reduction == "max":
                torch.maximum(part, exponents.amax(1, keepdim=True), out=part)
                continue
            weights = (exponents.mul_(2.0) if reduction == "squares" else exponents).exp2_()
            inside = slice(start - low, end - low)
            part.baddbmm_(ones[..., : weights.shape[1]], weights[..., inside])
            if pooled is not None:
                peaks = max_pool1d(weights, kernel_size, stride=1, padding=halo)[..., inside]
                pooled[..., start:end] += peaks.sum(1, keepdim=True)
    if reduction == "max":
        return out[:, 0].exp2_(), None
    norm = {"sum": group_size, "squares": 1, "mean": group_size * num_queries}[reduction]
    return out[:, 0].div_(norm), None if pooled is None else pooled[:, 0].div_(norm)


def _exponents(
    rows: Tensor, columns: Tensor, sm_scale: float, group_size: int, first_key: int, buffer: Tensor
) -> Tensor:
    """Base-2 logarithms of the attention weights of a tile, [num_kv_heads, rows, keys], float32, in ``buffer``.

    Args:
        rows: [num_kv_heads, num_queries * group_size, width], see :func:`_query_rows`.
        columns: [num_kv_heads, width, num_keys], see :func:`_key_columns`.
        sm_scale: softmax scale.
        group_size: rows per query.
        first_key: position of the first key relative to the first query, not positive (tokens).
        buffer: float32, at least as many elements as there are weights.
    """
    (num_kv_heads, num_rows, _), num_keys = rows.shape, columns.shape[2]
    shape = (num_kv_heads, num_rows, num_keys)
    p = buffer[: num_kv_heads * num_rows * num_keys].view(shape)
    product = p if rows.dtype == p.dtype else torch.empty(shape, dtype=rows.dtype)
    torch.baddbmm(product, rows, columns, beta=0, alpha=sm_scale * LOG2_E, out=product)
    if product is not p:
        p.copy_(product)
    masked = min(num_rows // group_size, first_key + num_keys - 1)  # queries before the last key
    if masked > 0:
        future = torch.full((masked, 1, num_keys), float("-inf"))
        future[:, 0].triu_(1 - first_key)
        p.view(num_kv_heads, -1, group_size, num_keys)[:, :masked] += future
    return p


def _query_rows(queries: Tensor, bias: Tensor, num_kv_heads: int, dtype: torch.dtype) -> Tensor:
    """Rows of the product, [num_kv_heads, num_queries * group_size, head_dim + LSE columns].

    Args:
        queries: [num_queries, num_qo_heads, head_dim].
        bias: [num_queries, num_qo_heads], float32, the sum of the last columns.
        num_kv_heads: KV heads.
        dtype: of the rows.
    """
    parts, rest = [queries.to(dtype)], bias[..., None]
    for _ in range(LSE_COLUMNS[dtype]):
        parts.append(rest.to(dtype))
        rest = rest - parts[-1]
    rows = torch.cat(parts, dim=-1)  # [num_queries, num_qo_heads, width]
    by_head = rows.view(rows.shape[0], num_kv_heads, -1, rows.shape[2]).transpose(0, 1)
    return by_head.reshape(num_kv_heads, -1, rows.shape[2])


def _key_columns(keys: Tensor, dtype: torch.dtype) -> Tensor:
    """Columns of the product, [num_kv_heads, head_dim + LSE columns, num_keys]; keys [num_keys, num_kv_heads, ...]."""
    num_keys, num_kv_heads, head_dim = keys.shape
    rows = torch.ones(num_kv_heads, num_keys, head_dim + LSE_COLUMNS[dtype], dtype=dtype)
    rows[..., :head_dim] = keys.transpose(0, 1)
    return rows.transpose(1, 2)


def _product_dtype(dtype: torch.dtype) -> torch.dtype:
    """bfloat16 only where oneDNN multiplies it: PyTorch's own product would be far slower than float32."""
    if dtype == torch.bfloat16 and torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return dtype if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32
    return torch.float32
