"""Entries per work item, from a run's or a suffix's length alone."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def run_chunk(length, chunk, cap):
    """Entries per work item of a run: longer where the run would have more than ``cap`` items."""
    return chunk * tl.maximum(tl.cdiv(length, chunk * cap), 1)


@triton.jit
def suffix_chunk(length, least, H: tl.constexpr, NUM_ITEMS: tl.constexpr, STEP: tl.constexpr):
    """Tokens per chunk of a suffix, from its length alone; NUM_ITEMS chunks fill the device."""
    return tl.maximum(tl.cdiv(tl.cdiv(length * H, NUM_ITEMS), STEP) * STEP, least)
