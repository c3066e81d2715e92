"""The definition of radix_select: every row sorted, one key at a time."""

from __future__ import annotations

import torch
from torch import Tensor


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
