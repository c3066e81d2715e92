"""compact_kv in vectorised torch: gather all, then scatter all."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag


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
        if indptr is None or weights is None:
            words = _as_words(rows)
            words.index_copy_(0, targets, words.index_select(0, src))
        else:
            rows.index_copy_(0, targets, _weighted_rows(rows, src, indptr, weights))


def _as_words(rows: Tensor) -> Tensor:
    """View rows as 8-byte integers where their length allows it: they move twice as fast as 2-byte ones."""
    row_bytes = rows.shape[1] * rows.element_size()
    aligned = row_bytes % 8 == 0 and rows.storage_offset() * rows.element_size() % 8 == 0
    return rows.view(torch.int64) if aligned else rows


def _weighted_rows(rows: Tensor, src: Tensor, indptr: Tensor, weights: Tensor) -> Tensor:
    """Sum every run of gathered rows in float32. Returns [C, head_dim] in the dtype of ``rows``."""
    gathered = rows.index_select(0, src).float()  # [M, head_dim]
    if gathered.shape[0] == 0:
        return rows.new_zeros(indptr.numel() - 1, rows.shape[1])
    order = torch.arange(gathered.shape[0])
    sums = embedding_bag(order, gathered, indptr[:-1].long(), mode="sum", per_sample_weights=weights)
    return sums.to(rows.dtype)
