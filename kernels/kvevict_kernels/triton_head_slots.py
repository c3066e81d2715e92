"""The numbering of the arena's rows, for kernels."""

from __future__ import annotations

import triton

from kvevict_kernels import head_slots

_compiled = triton.jit(head_slots.head_slot_of)
# Triton's interpreter runs plain functions as they are, but compiles none without triton.language in its module.
head_slot_of = _compiled if isinstance(_compiled, triton.JITFunction) else head_slots.head_slot_of
