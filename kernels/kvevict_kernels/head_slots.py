"""How the rows of an arena are numbered."""

from __future__ import annotations

from typing import Any


def head_slot_of(layer: Any, token_slot: Any, lane: Any, num_token_slots: Any, num_kv_heads: Any) -> Any:
    """Number of a row of K and V, counted through the arena ``[num_layers, num_token_slots, num_kv_heads, head_dim]``.

    A token that is not compressed lies in the lane of its KV head; compressed entries may lie in any. Rows of one lane
    are ``num_kv_heads`` apart, so ``head_slot_of(layer, 0, lane, ...) + num_kv_heads * token_slot`` is the same.

    Plain arithmetic on ints, tensors and arrays, which numba compiles as it stands (``triton_head_slots.py`` has it for
    Triton): nothing is checked, and the caller picks the integer type.

    Args:
        layer: int, or whatever can be broadcast against ``token_slot``.
        token_slot: likewise.
        lane: likewise.
        num_token_slots: rows of the arena per layer.
        num_kv_heads: lanes of a token slot.
    """
    slot = layer * num_token_slots + token_slot
    slot *= num_kv_heads
    return slot + lane


def token_slot_of(head_slot: Any, num_token_slots: Any, num_kv_heads: Any) -> Any:
    """Token slot in which a row lies; arguments as for :func:`head_slot_of`."""
    return head_slot // num_kv_heads % num_token_slots
