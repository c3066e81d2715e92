"""Layout of a new segment: run starts and row numbers, computed from the run lengths."""

from __future__ import annotations

import torch
from torch import Tensor

from kvevict_kernels.checks import check_index_range, check_int, check_tensor
from kvevict_kernels.dispatch import implementation
from kvevict_kernels.row_sizes import MAX_ROWS, head_slot_of

__all__ = ["alloc_head_slots"]


def alloc_head_slots(
    keep_lens: Tensor,
    token_slots: Tensor,
    num_token_slots: int,
    num_entries: int,
    *,
    per_slot: int = 1,
) -> tuple[Tensor, Tensor]:
    """Assign the runs of all (layer, KV head) pairs to rows in the segment's token slots.

    The segment is an index space of cells ``[num_layers, S, num_kv_heads]``, one head slot each, which holds
    ``per_slot`` rows. Entry ``e`` of the concatenated runs takes row ``e``, so any lane may hold an entry of any
    (layer, head), and nothing is padded::

        cell, part = divmod(e, per_slot)
        layer, rest = divmod(cell, S * num_kv_heads);  i, lane = divmod(rest, num_kv_heads)
        row = head_slot_of(layer, token_slots[i], lane, num_token_slots, num_kv_heads) * per_slot + part

    Args:
        keep_lens: [num_layers, num_kv_heads], int32, entries per run; may be 0.
        token_slots: [S], int64, distinct token slots of the segment, in the order in which they are filled.
        num_token_slots: token slots of the arena per layer.
        num_entries: ``keep_lens.sum()``, known on the host; never read from a device.
        per_slot: rows of a head slot (:func:`kvevict_kernels.row_sizes.ROWS_PER_SLOT`).

    Returns:
        indptr [num_layers * num_kv_heads + 1], int32, run starts (exclusive prefix sum in (layer, head) order), and
        rows [num_entries], int32, the row number of every entry.

    Raises:
        ValueError: wrong shape, dtype or device; ``num_entries`` beyond the segment's capacity; row numbers beyond
            int32; on the CPU also ``num_entries`` different from the sum, a negative length, or a token slot outside
            the arena.

    Differs: no paper; a scheme of this project.
    Cost: O(num_entries); no host sync; deterministic.
    """
    check_tensor("keep_lens", keep_lens, (None, None), torch.int32)
    num_layers, num_kv_heads = keep_lens.shape
    check_tensor("token_slots", token_slots, (None,), torch.int64, keep_lens.device)
    check_int("num_token_slots", num_token_slots, 1)
    check_int("per_slot", per_slot, 1)
    total = num_layers * num_token_slots * num_kv_heads * per_slot
    if total > MAX_ROWS:
        raise ValueError(f"num_token_slots: expected at most {MAX_ROWS} rows in all, got {total}")
    check_int("num_entries", num_entries, 0, token_slots.numel() * num_layers * num_kv_heads * per_slot)
    check_index_range("token_slots", token_slots, num_token_slots)
    run = implementation(keep_lens.device, alloc_head_slots_cpu, "alloc_head_slots")
    return run(keep_lens, token_slots, num_token_slots, num_entries, per_slot)


def alloc_head_slots_cpu(
    keep_lens: Tensor, token_slots: Tensor, num_token_slots: int, num_entries: int, per_slot: int
) -> tuple[Tensor, Tensor]:
    """CPU path of :func:`alloc_head_slots`, which also checks the lengths."""
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
    # Rounded up to whole cells: the last one may be filled in part.
    cells = segment.view(-1)[: -(-num_entries // per_slot)]
    rows = cells[:, None] * per_slot + torch.arange(per_slot)
    return indptr, rows.to(torch.int32).view(-1)[:num_entries]
