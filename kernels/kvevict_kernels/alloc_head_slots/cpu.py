"""alloc_head_slots in vectorised torch."""

from __future__ import annotations

import torch
from torch import Tensor

from kvevict_kernels.head_slots import head_slot_of


def alloc_head_slots_cpu(
    keep_lens: Tensor, token_slots: Tensor, num_token_slots: int, num_entries: int
) -> tuple[Tensor, Tensor]:
    """CPU path of :func:`kvevict_kernels.alloc_head_slots.alloc_head_slots`; also checks the lengths.

    Raises:
        ValueError: ``keep_lens`` has a negative length or does not sum to ``num_entries``.
    """
    num_layers, num_kv_heads = keep_lens.shape
    lens = keep_lens.flatten()
    if bool((lens < 0).any()):
        raise ValueError(f"keep_lens: expected lengths >= 0, got {int(lens.min())}")
    total = int(lens.sum())
    if total != num_entries:
        raise ValueError(f"num_entries: expected keep_lens.sum() = {total}, got {num_entries}")
    indptr = torch.zeros(lens.numel() + 1, dtype=torch.int32)
    torch.cumsum(lens, 0, dtype=torch.int32, out=indptr[1:])
    layers = torch.arange(num_layers)[:, None, None]
    lanes = torch.arange(num_kv_heads)
    segment: Tensor = head_slot_of(layers, token_slots[:, None], lanes, num_token_slots, num_kv_heads)
    return indptr, segment.to(torch.int32).view(-1)[:num_entries]
