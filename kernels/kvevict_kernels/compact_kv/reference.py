"""The definition of compact_kv, one row at a time."""

from __future__ import annotations

import torch
from torch import Tensor


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
