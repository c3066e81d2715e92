"""Numbering of the arena's rows."""

from __future__ import annotations

from typing import Any


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
