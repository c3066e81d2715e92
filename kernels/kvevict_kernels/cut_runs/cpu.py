"""cut_runs in vectorised torch."""

from __future__ import annotations

import torch
from torch import Tensor


def cut_runs_cpu(positions: Tensor, indptr: Tensor, start: int, end: int) -> tuple[Tensor, Tensor]:
    """CPU path of :func:`kvevict_kernels.cut_runs.cut_runs`: both searches in all runs at once."""
    low = indptr[:-1].long().expand(2, -1)
    high = indptr[1:].long().expand(2, -1)
    bounds = torch.tensor([[start], [end]], dtype=torch.int32)
    if positions.numel():
        for _ in range(positions.numel().bit_length()):
            middle = (low + high) // 2
            before = positions[middle.clamp(max=positions.numel() - 1)] < bounds
            searching = low < high
            low, high = (
                torch.where(searching & before, middle + 1, low),
                torch.where(searching & ~before, middle, high),
            )
    first, last = low.int()
    return first.contiguous(), last - first
