"""accumulated_attention in vectorised torch, a tile of queries and keys at a time.

The product itself yields the exponents ``log2(p) = sm_scale * log2(e) * (q . k - lse / sm_scale)``: query rows carry
``-lse / sm_scale`` in additional columns, where keys hold ones, and the factor is the product's ``alpha``. Base 2,
because PyTorch's exp2 is four times as fast as its exp where MKL computes the latter on a processor not its own.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvevict_kernels.stored_rows import gather_rows

KEYS_PER_TILE = 128
EARLIER_KEYS_PER_TILE = 1024
"""Where all keys come before all queries, so that nothing is masked: fewer and larger products, fewer wake-ups."""
WEIGHTS_PER_TILE = 2**19
"""Attention weights in memory at a time, at 4 to 6 bytes each: what caches hold."""
LSE_COLUMNS = 2
"""The log-sum-exp as a sum of values of the product's dtype: two of bfloat16 hold it to 2**-17 of its size."""


def accumulated_attention_cpu(
    queries: Tensor,
    lse: Tensor,
    k_buffer: Tensor,
    token_slots: Tensor,
    sm_scale: float,
    first_key: int,
    reduction: Literal["sum", "squares", "max"],
) -> Tensor:
    """CPU path of :func:`kvevict_kernels.accumulated_attention.accumulated_attention`.

    Where the processor multiplies bfloat16, bfloat16 inputs are multiplied as they are, which rounds the exponents
    (not the scores) to 8 bits: weights near 1 are exact, a weight of 2**-10 is off by up to 2.2 %, to either side.
    Their sums are float32. Squares and maxima are multiplied in float32: few queries make them, and rounded exponents
    would make ties of what a selection must order. Queries before a tile's first key are left out, keys after a
    tile's last query as well. ``first_key`` is the position of the first key relative to the first query.
    """
    num_queries, num_qo_heads, _ = queries.shape
    num_kv_heads = k_buffer.shape[1]
    group_size = num_qo_heads // num_kv_heads
    num_seen = min(token_slots.numel(), max(0, num_queries - first_key))
    is_max = reduction == "max"
    tile_keys = EARLIER_KEYS_PER_TILE if first_key + num_seen <= 0 else KEYS_PER_TILE
    out = torch.full((num_kv_heads, 1, token_slots.numel()), float("-inf") if is_max else 0.0)
    dtype = _product_dtype(queries.dtype) if reduction == "sum" else torch.float32
    keys = [
        _key_columns(gather_rows(k_buffer, token_slots[start : min(start + tile_keys, num_seen)]), dtype)
        for start in range(0, num_seen, tile_keys)
    ]
    tile_queries = min(num_queries, max(1, WEIGHTS_PER_TILE // (num_qo_heads * tile_keys)))
    buffer = torch.empty(num_qo_heads * tile_queries * tile_keys)
    ones = torch.ones(num_kv_heads, 1, tile_queries * group_size)
    for begin in range(0, num_queries, tile_queries):
        tile = slice(begin, begin + tile_queries)
        rows = _query_rows(queries[tile], lse[tile] / -sm_scale, num_kv_heads, dtype)
        for i, columns in enumerate(keys):
            start = i * tile_keys
            ahead = first_key + start - begin  # of the tile's first query
            seeing = rows[:, max(0, ahead) * group_size :]
            if seeing.shape[1] == 0:
                break
            exponents = _exponents(seeing, columns, sm_scale, group_size, min(0, ahead), buffer)
            part = out[..., start : start + exponents.shape[2]]
            if is_max:
                torch.maximum(part, exponents.amax(1, keepdim=True), out=part)
                continue
            if reduction == "squares":
                exponents.mul_(2.0)
            part.baddbmm_(ones[..., : exponents.shape[1]], exponents.exp2_())
    if is_max:
        return out[:, 0].exp2_()
    return out[:, 0].div_(group_size) if reduction == "sum" else out[:, 0]


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
    p = buffer[: math.prod(shape)].view(shape)
    product = p if rows.dtype == p.dtype else torch.empty(shape, dtype=rows.dtype)
    torch.baddbmm(product, rows, columns, beta=0, alpha=sm_scale * math.log2(math.e), out=product)
    if product is not p:
        p.copy_(product)
    masked = min(num_rows // group_size, first_key + num_keys - 1)  # queries before the last key
    if masked > 0:
        future = torch.full((masked, 1, num_keys), float("-inf"))
        future[:, 0].triu_(1 - first_key)
        p.view(num_kv_heads, -1, group_size, num_keys)[:, :masked] += future
    return p


def _query_rows(queries: Tensor, bias: Tensor, num_kv_heads: int, dtype: torch.dtype) -> Tensor:
    """Rows of the product, [num_kv_heads, num_queries * group_size, head_dim + LSE_COLUMNS].

    Args:
        queries: [num_queries, num_qo_heads, head_dim].
        bias: [num_queries, num_qo_heads], float32, what the last columns add up to.
        num_kv_heads: KV heads.
        dtype: of the rows.
    """
    parts, rest = [queries.to(dtype)], bias[..., None]
    for _ in range(LSE_COLUMNS):
        parts.append(rest.to(dtype))
        rest = rest - parts[-1]
    rows = torch.cat(parts, dim=-1)  # [num_queries, num_qo_heads, width]
    by_head = rows.view(rows.shape[0], num_kv_heads, -1, rows.shape[2]).transpose(0, 1)
    return by_head.reshape(num_kv_heads, -1, rows.shape[2])


def _key_columns(keys: Tensor, dtype: torch.dtype) -> Tensor:
    """Columns of the product, [num_kv_heads, head_dim + LSE_COLUMNS, num_keys].

    Args:
        keys: [num_keys, num_kv_heads, head_dim].
        dtype: of the columns.
    """
    rows = pad(keys.to(dtype), (0, LSE_COLUMNS), value=1.0)
    return rows.transpose(0, 1).contiguous().transpose(1, 2)


def _product_dtype(dtype: torch.dtype) -> torch.dtype:
    """bfloat16 only where oneDNN multiplies it: PyTorch's own product would be far slower than float32."""
    if dtype == torch.bfloat16 and torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return dtype if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32
    return torch.float32
