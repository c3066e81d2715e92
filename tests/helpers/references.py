"""The definitions of the kernels: loops over rows or entries, or plain products in float32, obviously right."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from kvevict_kernels.row_sizes import head_slot_of


def alloc_head_slots_reference(
    keep_lens: Tensor, token_slots: Tensor, num_token_slots: int, num_entries: int, *, per_slot: int = 1
) -> tuple[Tensor, Tensor]:
    """Same contract as :func:`kvevict_kernels.alloc_head_slots.alloc_head_slots`, slow and obvious."""
    _, num_kv_heads = keep_lens.shape
    slots = token_slots.tolist()
    starts = [0]
    for length in keep_lens.flatten().tolist():
        starts.append(starts[-1] + length)
    rows = []
    for entry in range(num_entries):
        cell, part = divmod(entry, per_slot)
        layer, rest = divmod(cell, len(slots) * num_kv_heads)
        i, lane = divmod(rest, num_kv_heads)
        rows.append(head_slot_of(layer, slots[i], lane, num_token_slots, num_kv_heads) * per_slot + part)
    device = keep_lens.device
    return (
        torch.tensor(starts, dtype=torch.int32, device=device),
        torch.tensor(rows, dtype=torch.int32, device=device),
    )


def cut_runs_reference(positions: Tensor, indptr: Tensor, start: int, end: int) -> tuple[Tensor, Tensor]:
    """Same contract as :func:`kvevict_kernels.cut_runs.cut_runs`, slow and obvious."""
    values = positions.tolist()
    starts, lens = [], []
    for first, last in pairwise(indptr.tolist()):
        before = sum(position < start for position in values[first:last])
        starts.append(first + before)
        lens.append(sum(position < end for position in values[first:last]) - before)
    both = torch.tensor([starts, lens], dtype=torch.int32, device=positions.device)
    return both[0], both[1]


def compact_kv_reference(
    k_arena: Tensor,
    v_arena: Tensor,
    src: Tensor,
    dst: Tensor,
    *,
    indptr: Tensor | None = None,
    weights: Tensor | None = None,
) -> None:
    """Same contract as :func:`kvevict_kernels.compact_kv.compact_kv`, slow and obvious."""
    head_dim = k_arena.shape[-1]
    for arena in (k_arena, v_arena):
        rows = arena.view(-1, head_dim)
        old = rows.clone()
        for i, target in enumerate(dst.tolist()):
            if indptr is None or weights is None:
                rows[target] = old[int(src[i])]
                continue
            total = torch.zeros(head_dim, dtype=torch.float32, device=arena.device)
            for j in range(int(indptr[i]), int(indptr[i + 1])):
                total += weights[j] * old[int(src[j])].float()
            rows[target] = total.to(arena.dtype)


def top_mask_reference(keys: Tensor, counts: int | Tensor) -> Tensor:
    """Same contract as :func:`kvevict_kernels.radix_select.top_mask`, slow and obvious."""
    mask = torch.zeros(keys.shape, dtype=torch.bool)
    for i, (row, count) in enumerate(zip(keys.tolist(), _per_row(keys, counts), strict=True)):
        best_first = sorted(range(len(row)), key=row.__getitem__, reverse=True)  # stable: equal keys stay in order
        for position in best_first[:count]:
            mask[i, position] = True
    return mask.to(keys.device)


def kth_largest_reference(keys: Tensor, counts: int | Tensor) -> Tensor:
    """Same contract as :func:`kvevict_kernels.radix_select.kth_largest`, slow and obvious."""
    found = [
        sorted(row, reverse=True)[max(count, 1) - 1]
        for row, count in zip(keys.tolist(), _per_row(keys, counts), strict=True)
    ]
    return torch.tensor(found, dtype=keys.dtype, device=keys.device)


def _per_row(keys: Tensor, counts: int | Tensor) -> list[int]:
    return [counts] * keys.shape[0] if isinstance(counts, int) else counts.tolist()


def attention_reference(
    queries: Tensor, lse: Tensor, keys: Tensor, *, sm_scale: float, key_start: int, query_start: int
) -> Tensor:
    """[n, num_kv_heads, group size, N], float32: weights of keys ([N, num_kv_heads, head_dim]) that may follow."""
    scores = torch.einsum("ihgd,jhd->ihgj", queries.float().unflatten(1, (keys.shape[1], -1)), keys.float())
    weights = torch.exp(sm_scale * scores - lse.view(*scores.shape[:3], 1))
    later = torch.arange(len(keys)) + key_start > torch.arange(len(queries))[:, None] + query_start
    return weights.masked_fill(later.to(weights.device)[:, None, None], 0.0)


def window_scores_reference(
    queries: Tensor,
    lse: Tensor,
    k_buffer: Tensor,
    token_slots: Tensor,
    *,
    kernel_size: int = 1,
    pooling: Literal["max", "avg"] = "max",
    order: Literal["pool-mean", "mean-pool"] = "pool-mean",
    **where: Any,
) -> tuple[Tensor, Tensor]:
    """Same contract as :func:`kvevict_kernels.key_scores.window_scores`, slow and obvious."""
    weights = attention_reference(queries, lse, k_buffer[token_slots], **where)
    mean = weights.mean((0, 2))
    pooled = _pool(mean if order == "mean-pool" else weights, kernel_size, pooling)
    return pooled if order == "mean-pool" else pooled.mean((0, 2)), mean


def _pool(rows: Tensor, kernel_size: int, pooling: str) -> Tensor:
    out = torch.empty_like(rows)
    for n in range(rows.shape[-1]):
        window = rows[..., max(0, n - kernel_size // 2) : n + kernel_size // 2 + 1]
        out[..., n] = window.amax(-1) if pooling == "max" else window.sum(-1) / kernel_size
    return out


def accumulated_attention_reference(
    queries: Tensor,
    lse: Tensor,
    k_buffer: Tensor,
    token_slots: Tensor,
    *,
    reduction: Literal["sum", "squares"] = "sum",
    **where: Any,
) -> Tensor:
    """Same contract as :func:`kvevict_kernels.key_scores.accumulated_attention`, slow and obvious."""
    weights = attention_reference(queries, lse, k_buffer[token_slots], **where)
    return weights.mean(2).sum(0) if reduction == "sum" else weights.square().sum((0, 2))
