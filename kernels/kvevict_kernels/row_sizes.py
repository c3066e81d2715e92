"""Sizes of rows of 16 and of 4 bits, and their numbers: what all packages share, without torch."""

from __future__ import annotations

from typing import Any

GROUP = 32
"""head_dim is a multiple of it where rows have 4 bits: kernels read so many codes at once."""
WIDTHS = (16, 4)
"""Bits of a number in a row; 16 stands for whatever the pool's dtype has."""
ROWS_IN_PLACE = 4
"""Rows of 4 bits in the place of one of 16."""
ROWS_PER_SLOT = dict(zip(WIDTHS, (1, ROWS_IN_PLACE), strict=True))
"""Rows of a head slot, by their bits."""
STEP_BYTES = 2
"""Of the step of a row of 4 bits."""
MAX_ROWS = 2**31 - 1024
"""Row numbers are int32; one block of headroom, so that offsets in kernels never wrap."""


def row_bytes(bits: int, head_dim: int, itemsize: int = 2) -> int:
    """Bytes of a row outside of an arena: of 16 bits numbers of so many bytes, of 4 bits its codes, then its step."""
    return head_dim * itemsize if bits == WIDTHS[0] else head_dim // 2 + STEP_BYTES


def head_slot_of(layer: Any, token_slot: Any, lane: Any, num_token_slots: Any, num_kv_heads: Any) -> Any:
    """Number of a K or V row in the arena ``[num_layers, num_token_slots, num_kv_heads, head_dim]``.

    An uncompressed token lies in the lane of its KV head; a compressed entry may lie in any lane. Rows of one lane are
    ``num_kv_heads`` apart, so ``head_slot_of(layer, 0, lane, ...) + num_kv_heads * token_slot`` is the same.

    Unchecked arithmetic on ints, tensors or arrays that broadcast; the caller picks the integer type. numba compiles
    this function; ``triton_rows.py`` has it for Triton.
    """
    slot = layer * num_token_slots + token_slot
    # In place: of tensors this is one temporary less.
    slot *= num_kv_heads
    return slot + lane


def token_slot_of(head_slot: Any, num_token_slots: Any, num_kv_heads: Any) -> Any:
    """Token slot that contains a row; arguments as for :func:`head_slot_of`."""
    return head_slot // num_kv_heads % num_token_slots
