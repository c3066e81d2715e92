"""The definition of alloc_head_slots, one entry at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from kvevict_kernels.head_slots import head_slot_of


def alloc_head_slots_reference(
    keep_lens: Tensor, token_slots: Tensor, num_token_slots: int, num_entries: int
) -> tuple[Tensor, Tensor]:
    """Same contract as :func:`kvevict_kernels.alloc_head_slots.alloc_head_slots`, slow and obvious."""
    _, num_kv_heads = keep_lens.shape
    slots = token_slots.tolist()
    starts = [0]
    for length in keep_lens.flatten().tolist():
        starts.append(starts[-1] + length)
    head_slots = []
    for entry in range(num_entries):
        layer, rest = divmod(entry, len(slots) * num_kv_heads)
        i, lane = divmod(rest, num_kv_heads)
        head_slots.append(head_slot_of(layer, slots[i], lane, num_token_slots, num_kv_heads))
    device = keep_lens.device
    return (
        torch.tensor(starts, dtype=torch.int32, device=device),
        torch.tensor(head_slots, dtype=torch.int32, device=device),
    )
