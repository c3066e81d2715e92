"""alloc_head_slots on the device: one program scans the run lengths, then one program per block writes row numbers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvevict_kernels.triton_rows import head_slot_of

SCAN_BLOCK = 1024
ENTRY_BLOCK = 1024


@triton.jit
def _indptr_kernel(
    lens_ptr,  # [num_runs] int32
    indptr_ptr,  # [num_runs + 1] int32
    num_runs,
    BLOCK: tl.constexpr,
):
    """Inclusive sums in blocks with a carry, by a single program; element 0 is stored separately."""
    tl.store(indptr_ptr, 0)
    carry = 0
    # One program scans all: there are a few hundred runs, and several programs would need a second launch to join their
    # sums.
    for start in range(0, num_runs, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        mask = offs < num_runs
        lens = tl.load(lens_ptr + offs, mask=mask, other=0)
        tl.store(indptr_ptr + 1 + offs, carry + tl.cumsum(lens, 0), mask=mask)
        carry += tl.sum(lens, 0)


@triton.jit(
    # These differ with every segment. Triton would compile anew for a 1, and for multiples of 16.
    do_not_specialize=["num_entries", "num_token_slots", "cells_per_layer"],
    do_not_specialize_on_alignment=["token_slots_ptr"],
)
def _head_slots_kernel(
    token_slots_ptr,  # [S] int64
    numbers_ptr,  # [num_entries] int32
    num_entries,
    num_token_slots,
    num_kv_heads,
    cells_per_layer,  # S * num_kv_heads
    PER_SLOT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the row number of each entry; programs are independent."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = entry < num_entries
    cell = entry // PER_SLOT
    layer = cell // cells_per_layer
    rest = cell % cells_per_layer
    slot = tl.load(token_slots_ptr + rest // num_kv_heads, mask=mask, other=0)
    head_slot = head_slot_of(layer.to(tl.int64), slot, rest % num_kv_heads, num_token_slots, num_kv_heads)
    tl.store(numbers_ptr + entry, (head_slot * PER_SLOT + entry % PER_SLOT).to(tl.int32), mask=mask)


def alloc_head_slots_triton(
    keep_lens: Tensor, token_slots: Tensor, num_token_slots: int, num_entries: int, per_slot: int
) -> tuple[Tensor, Tensor]:
    """Device path of :func:`kvevict_kernels.alloc_head_slots.alloc_head_slots`: two launches."""
    num_kv_heads = keep_lens.shape[1]
    num_runs = keep_lens.numel()
    indptr = torch.empty(num_runs + 1, dtype=torch.int32, device=keep_lens.device)
    rows = torch.empty(num_entries, dtype=torch.int32, device=keep_lens.device)
    _indptr_kernel[(1,)](keep_lens, indptr, num_runs, BLOCK=SCAN_BLOCK)
    if num_entries:
        _head_slots_kernel[(triton.cdiv(num_entries, ENTRY_BLOCK),)](
            token_slots,
            rows,
            num_entries,
            num_token_slots,
            num_kv_heads,
            token_slots.numel() * num_kv_heads,
            PER_SLOT=per_slot,
            BLOCK=ENTRY_BLOCK,
        )
    return indptr, rows
