"""The part of each run of a segment whose positions lie in a range of tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from kvevict_kernels.checks import check_int, check_tensor
from kvevict_kernels.dispatch import implementation

__all__ = ["cut_runs"]


def cut_runs(positions: Tensor, indptr: Tensor, start: int, end: int) -> tuple[Tensor, Tensor]:
    """Find the entries of each run whose positions are in ``[start, end)``, by two binary searches per run.

    Args:
        positions: [num_entries], int32, logical positions, ascending within a run.
        indptr: [num_runs + 1], int32, start of each run.
        start: first position (tokens).
        end: position after the last one, >= ``start``.

    Returns:
        starts [num_runs], int32, index of the first such entry, and lens [num_runs], int32, their number.

    Raises:
        ValueError: wrong shape, dtype or device; a negative ``start``, an ``end`` before it.

    Differs: no paper; a scheme of this project.
    Cost: O(num_runs * log(num_entries)), one launch; no host sync; deterministic.
    """
    check_tensor("positions", positions, (None,), torch.int32)
    check_tensor("indptr", indptr, (None,), torch.int32, positions.device)
    check_int("start", start, 0)
    check_int("end", end, start)
    return implementation(positions.device, cut_runs_cpu, "cut_runs")(positions, indptr, start, end)


def cut_runs_cpu(positions: Tensor, indptr: Tensor, start: int, end: int) -> tuple[Tensor, Tensor]:
    """CPU path of :func:`cut_runs`: both searches in all runs at once."""
    low = indptr[:-1].long().expand(2, -1)
    high = indptr[1:].long().expand(2, -1)
    bounds = torch.tensor([[start], [end]], dtype=torch.int32)
    # As many halvings as the longest possible run needs: its real length would have to be read first.
    for _ in range(positions.numel().bit_length()):
        middle = (low + high) // 2
        # A search that has ended may point behind the last entry.
        before = positions[middle.clamp(max=positions.numel() - 1)] < bounds
        searching = low < high
        low = torch.where(searching & before, middle + 1, low)
        high = torch.where(searching & ~before, middle, high)
    first, last = low.int()
    return first.contiguous(), last - first
