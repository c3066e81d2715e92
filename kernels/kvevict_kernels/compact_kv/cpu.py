"""compact_kv in vectorised torch: gather all rows, then scatter all, a group of columns at a time."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from kvevict_kernels.stored_rows import as_moved, gather_rows

TEMPORARY_BYTES = 2**21
"""Bounds the rows in flight: columns never mix, so groups of them move one after the other."""


def compact_kv_cpu(
    k_arena: Tensor, v_arena: Tensor, src: Tensor, dst: Tensor, indptr: Tensor | None, weights: Tensor | None
) -> None:
    """CPU path of :func:`kvevict_kernels.compact_kv.compact_kv`; checks ``dst`` and ``indptr`` too.

    Raises:
        ValueError: ``dst`` repeats a head slot; ``indptr`` does not ascend from 0 to M.
    """
    ordered = dst.sort().values
    if bool((ordered[1:] == ordered[:-1]).any()):
        raise ValueError("dst: expected head slots that are all different, got a repeated one")
    if indptr is not None:
        ends = (int(indptr[0]), int(indptr[-1]))
        if ends != (0, src.numel()) or bool((indptr[1:] < indptr[:-1]).any()):
            raise ValueError(f"indptr: expected to ascend from 0 to {src.numel()}, got {ends[0]} to {ends[1]}")
    head_dim = k_arena.shape[-1]
    targets = dst.long()
    for arena in (k_arena, v_arena):
        rows = arena.view(-1, head_dim)
        if indptr is None:
            rows = _as_words(rows)
        for columns in torch.split(rows, _columns_at_once(rows, dst.numel()), dim=1):
            if indptr is None or weights is None:
                columns.index_copy_(0, targets, columns.index_select(0, src))
            else:
                bits = as_moved(columns)
                bits.index_copy_(0, targets, as_moved(_weighted_rows(columns, src, indptr, weights)))


def _columns_at_once(rows: Tensor, num_moves: int) -> int:
    """Columns of a group: groups of 8 bytes at least, about as wide as each other."""
    row_bytes = rows.shape[1] * rows.element_size()
    num_groups = min(-(-num_moves * row_bytes // TEMPORARY_BYTES), max(row_bytes // 8, 1))
    return -(-rows.shape[1] // max(num_groups, 1))


def _as_words(rows: Tensor) -> Tensor:
    """View rows as 8-byte integers where their length allows it: they move twice as fast as 2-byte ones."""
    row_bytes = rows.shape[1] * rows.element_size()
    aligned = row_bytes % 8 == 0 and rows.storage_offset() * rows.element_size() % 8 == 0
    return rows.view(torch.int64) if aligned else as_moved(rows)


def _weighted_rows(rows: Tensor, src: Tensor, indptr: Tensor, weights: Tensor) -> Tensor:
    """Sum every run of gathered rows in float32. Returns [C, width] in the dtype of ``rows``."""
    num_runs, width = indptr.numel() - 1, rows.shape[1]
    sums = rows.new_zeros(num_runs, width)
    # A gathered row, its float32 copy and what embedding_bag makes of it: 16 bytes for each element.
    runs_at_once = max(TEMPORARY_BYTES // (16 * width) * num_runs // max(src.numel(), 1), 1)
    for begin in range(0, num_runs, runs_at_once):
        bounds = indptr[begin : begin + runs_at_once + 1].long()
        first, last = int(bounds[0]), int(bounds[-1])
        if first == last:
            continue
        gathered = gather_rows(rows, src[first:last]).float()
        order = torch.arange(last - first)
        part = weights[first:last]
        block = embedding_bag(order, gathered, bounds[:-1] - first, mode="sum", per_sample_weights=part)
        sums[begin : begin + runs_at_once] = block
    return sums
