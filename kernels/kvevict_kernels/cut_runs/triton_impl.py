"""cut_runs on the device: one lane per run does both binary searches."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

RUN_BLOCK = 32
"""Runs per program. Searches are chains of dependent loads, so many small programs hide the latency."""


@triton.jit
def _first_at_or_after(positions_ptr, low, high, bound, steps):
    """Index of the first entry in [low, high) whose position is at least ``bound``; ``high`` if there is none."""
    for _ in range(steps):
        searching = low < high
        # The sum of both could exceed int32.
        middle = low + (high - low) // 2
        before = tl.load(positions_ptr + middle, mask=searching, other=0) < bound
        low = tl.where(searching & before, middle + 1, low)
        high = tl.where(searching & (before == 0), middle, high)
    return low


@triton.jit(
    do_not_specialize=["start", "end", "steps", "num_runs"],
    do_not_specialize_on_alignment=["positions_ptr", "indptr_ptr", "starts_ptr", "lens_ptr"],
)
def _cut_runs_kernel(
    positions_ptr,  # [num_entries] int32
    indptr_ptr,  # [num_runs + 1] int32
    starts_ptr,  # [num_runs] int32
    lens_ptr,  # [num_runs] int32
    start,
    end,
    steps,  # halvings that leave one entry
    num_runs,
    BLOCK: tl.constexpr,
):
    run = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = run < num_runs
    low = tl.load(indptr_ptr + run, mask=mask, other=0)
    high = tl.load(indptr_ptr + run + 1, mask=mask, other=0)
    first = _first_at_or_after(positions_ptr, low, high, start, steps)
    # From the first search's result on: the end lies behind the beginning.
    last = _first_at_or_after(positions_ptr, first, high, end, steps)
    tl.store(starts_ptr + run, first, mask=mask)
    tl.store(lens_ptr + run, last - first, mask=mask)


def cut_runs_triton(positions: Tensor, indptr: Tensor, start: int, end: int) -> tuple[Tensor, Tensor]:
    """Device path of :func:`kvevict_kernels.cut_runs.cut_runs`: one launch."""
    num_runs = indptr.numel() - 1
    starts = torch.empty(num_runs, dtype=torch.int32, device=indptr.device)
    lens = torch.empty_like(starts)
    steps = positions.numel().bit_length()
    options = {"BLOCK": RUN_BLOCK, "num_warps": 1}
    if num_runs:
        grid = (triton.cdiv(num_runs, RUN_BLOCK),)
        _cut_runs_kernel[grid](positions, indptr, starts, lens, start, end, steps, num_runs, **options)
    return starts, lens
