from __future__ import annotations

import torch

from kvevict_kernels.row_sizes import head_slot_of, token_slot_of


def test_rows_are_numbered_as_they_lie_in_the_arena() -> None:
    """Tensors are broadcast, and left alone."""
    layers, slots, lanes = torch.arange(3)[:, None, None], torch.arange(7)[:, None], torch.arange(5)
    copies = [x.clone() for x in (layers, slots, lanes)]
    head_slots = head_slot_of(layers, slots, lanes, 7, 5)
    assert head_slots.equal(torch.arange(3 * 7 * 5).view(3, 7, 5))
    assert token_slot_of(head_slots, 7, 5).equal(slots.expand(3, 7, 5))
    assert (head_slot_of(2, 6, 4, 7, 5), token_slot_of(104, 7, 5)) == (104, 6)
    assert head_slot_of(0, slots.int(), 0, 7, 5).dtype == torch.int32
    assert all(x.equal(copy) for x, copy in zip((layers, slots, lanes), copies, strict=True))
