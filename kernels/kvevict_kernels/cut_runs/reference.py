"""The definition of cut_runs, one run at a time."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


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
