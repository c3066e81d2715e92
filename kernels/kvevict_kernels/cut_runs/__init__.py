"""Which part of each run of a segment stands for a range of tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from kvevict_kernels.checks import check_int, check_tensor
from kvevict_kernels.cut_runs.cpu import cut_runs_cpu
from kvevict_kernels.cut_runs.reference import cut_runs_reference
from kvevict_kernels.dispatch import backend_for

__all__ = ["cut_runs", "cut_runs_reference"]


def cut_runs(positions: Tensor, indptr: Tensor, start: int, end: int) -> tuple[Tensor, Tensor]:
    """Find the entries of each run whose positions are in ``[start, end)``, by two binary searches per run.

    Args:
        positions: [num_entries], int32, logical positions, ascending within a run.
        indptr: [num_runs + 1], int32, where each run starts.
        start: first position (tokens).
        end: position after the last one, >= ``start``.

    Returns:
        starts [num_runs], int32, place of the first such entry, and lens [num_runs], int32, how many there are.

    Raises:
        ValueError: wrong shape, dtype or device; a negative ``start``, an ``end`` before it.

    Differs: no paper; a scheme of this project.
    Cost: O(num_runs * log(num_entries)), one launch; no host sync; deterministic.
    """
    check_tensor("positions", positions, (None,), torch.int32)
    check_tensor("indptr", indptr, (None,), torch.int32, positions.device)
    check_int("start", start, 0)
    check_int("end", end, start)
    if backend_for(positions.device) == "cpu":
        return cut_runs_cpu(positions, indptr, start, end)
    from kvevict_kernels.cut_runs.triton_impl import cut_runs_triton

    return cut_runs_triton(positions, indptr, start, end)
