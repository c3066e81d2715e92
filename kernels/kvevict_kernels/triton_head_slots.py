"""Numbering of the arena's rows, for Triton kernels."""

from __future__ import annotations

import triton
import triton.language as tl  # noqa: F401  (Triton's interpreter compiles no function whose module lacks it)


@triton.jit
def head_slot_of(layer, token_slot, lane, num_token_slots, num_kv_heads):
    """:func:`kvevict_kernels.head_slots.head_slot_of` without annotations, which Triton's compiler rejects."""
    return (layer * num_token_slots + token_slot) * num_kv_heads + lane
