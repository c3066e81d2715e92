"""The numbering of the arena's rows, for kernels."""

from __future__ import annotations

import triton

from kvevict_kernels import head_slots

head_slot_of = triton.jit(head_slots.head_slot_of)
