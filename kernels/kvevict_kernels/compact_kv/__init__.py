"""Move the K and V rows that survive an eviction into the head slots of their segment, in place."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from kvevict_kernels.checks import FP8, KV_DTYPES, check_index_range, check_tensor
from kvevict_kernels.dispatch import implementation
from kvevict_kernels.stored_rows import as_moved, as_words, gather_rows

__all__ = ["compact_kv"]

TEMPORARY_BYTES = 2**21
"""Limit of the CPU path's temporary: columns are independent, so groups of them are moved one after the other."""


def compact_kv(
    k_arena: Tensor,
    v_arena: Tensor,
    src: Tensor,
    dst: Tensor,
    *,
    indptr: Tensor | None = None,
    weights: Tensor | None = None,
) -> None:
    """Move rows, or weighted sums of rows, of both arenas to new head slots.

    Without weights row ``dst[i]`` becomes the old row ``src[i]``, bit for bit. With weights it becomes the sum of
    ``weights[j] * old row src[j]`` over ``j`` in ``[indptr[i], indptr[i + 1])``, in float32 in ascending ``j``, rounded
    once, with the same weights for K and V; an empty run gives zeros. *Old* is the content before the call: ``src`` and
    ``dst`` may overlap in any way (README.md: why compaction goes through a temporary).

    Args:
        k_arena: [num_layers, num_token_slots, num_kv_heads, head_dim], bfloat16, float16, float32 or float8_e4m3fn.
        v_arena: like ``k_arena``; without columns if values are a part of the keys' rows.
        src: [M], int32, head slots to read; may repeat.
        dst: [C], int32, distinct head slots to write; C == M without weights.
        indptr: [C + 1], int32, from 0 to M: the run of ``src`` and ``weights`` for each written row. With weights only.
        weights: [M], float32. With ``indptr`` only.

    Raises:
        ValueError: wrong shape, dtype or device; only one of ``indptr`` and ``weights``; on the CPU also a head slot
            outside the arena, a repeated ``dst``, or an ``indptr`` that does not ascend from 0 to M.

    Source: merging after D2O (arXiv 2406.13035); the moves are a scheme of this project.
    Cost: reads M and writes C rows of K and of V; rows in the temporary (on the CPU, and of weighted sums: all) are
        written and read once more; no host sync on a device; deterministic, no atomics.
    """
    check_tensor("k_arena", k_arena, (None, None, None, None), (*KV_DTYPES, FP8))
    device = k_arena.device
    v_shape = (*k_arena.shape[:3], k_arena.shape[3] if v_arena.numel() else 0)
    check_tensor("v_arena", v_arena, v_shape, k_arena.dtype, device)
    check_tensor("src", src, (None,), torch.int32, device)
    if (indptr is None) != (weights is None):
        given = "indptr" if weights is None else "weights"
        raise ValueError(f"indptr, weights: expected both or neither, got {given} only")
    num_moves = src.numel() if indptr is None else None
    check_tensor("dst", dst, (num_moves,), torch.int32, device)
    if indptr is not None and weights is not None:
        check_tensor("indptr", indptr, (dst.numel() + 1,), torch.int32, device)
        check_tensor("weights", weights, (src.numel(),), torch.float32, device)
    num_rows = k_arena.shape[:3].numel()
    check_index_range("src", src, num_rows)
    check_index_range("dst", dst, num_rows)
    if dst.numel() == 0:
        return
    implementation(device, compact_kv_cpu, "compact_kv")(k_arena, v_arena, src, dst, indptr, weights)


def compact_kv_cpu(
    k_arena: Tensor, v_arena: Tensor, src: Tensor, dst: Tensor, indptr: Tensor | None, weights: Tensor | None
) -> None:
    """CPU path of :func:`compact_kv`: gather all rows, then scatter all, one group of columns at a time."""
    # Two writes of one row would leave either of them. A device is not asked, which would stall its stream.
    ordered = dst.sort().values
    if bool((ordered[1:] == ordered[:-1]).any()):
        raise ValueError("dst: expected head slots that are all different, got a repeated one")
    if indptr is not None:
        ends = (int(indptr[0]), int(indptr[-1]))
        if ends != (0, src.numel()) or bool((indptr[1:] < indptr[:-1]).any()):
            raise ValueError(f"indptr: expected to ascend from 0 to {src.numel()}, got {ends[0]} to {ends[1]}")
    targets = dst.long()
    for arena in (k_arena, v_arena):
        # Values that are a part of the keys' rows have moved with these.
        if not arena.numel():
            continue
        rows = arena.view(-1, arena.shape[-1])
        if indptr is None:
            rows = as_words(rows)
        for columns in torch.split(rows, _columns_at_once(rows, dst.numel()), dim=1):
            if indptr is None or weights is None:
                # All rows are gathered before one is written: destinations may be sources of others.
                columns.index_copy_(0, targets, columns.index_select(0, src))
            else:
                bits = as_moved(columns)
                bits.index_copy_(0, targets, as_moved(_weighted_rows(columns, src, indptr, weights)))


def _columns_at_once(rows: Tensor, num_moves: int) -> int:
    """Columns per group: at least 8 bytes, groups of about equal width."""
    row_bytes = rows.shape[1] * rows.element_size()
    num_groups = min(-(-num_moves * row_bytes // TEMPORARY_BYTES), max(row_bytes // 8, 1))
    return -(-rows.shape[1] // max(num_groups, 1))


def _weighted_rows(rows: Tensor, src: Tensor, indptr: Tensor, weights: Tensor) -> Tensor:
    """Sum every run of gathered rows in float32. Returns [C, width] in the dtype of ``rows``."""
    num_runs, width = indptr.numel() - 1, rows.shape[1]
    sums = rows.new_zeros(num_runs, width)
    # A gathered row, its float32 copy and embedding_bag's temporaries: 16 bytes per element.
    runs_at_once = max(TEMPORARY_BYTES // (16 * width) * num_runs // max(src.numel(), 1), 1)
    for begin in range(0, num_runs, runs_at_once):
        bounds = indptr[begin : begin + runs_at_once + 1].long()
        first, last = int(bounds[0]), int(bounds[-1])
        if first == last:
            continue
        gathered = gather_rows(rows, src[first:last]).float()
        order = torch.arange(last - first)
        part = weights[first:last]
        # It sums runs of rows with weights in one call, in ascending order.
        block = embedding_bag(order, gathered, bounds[:-1] - first, mode="sum", per_sample_weights=part)
        sums[begin : begin + runs_at_once] = block
    return sums
