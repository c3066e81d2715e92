from __future__ import annotations

import torch

from kvevict_kernels.head_slots import head_slot_of, token_slot_of

SHAPE = (3, 7, 5)  # layers, token slots, KV heads


def test_rows_are_numbered_as_they_lie_in_the_arena() -> None:
    arena = torch.arange(3 * 7 * 5).view(SHAPE)
    for layer in range(3):
        for token_slot in range(7):
            for lane in range(5):
                head_slot = head_slot_of(layer, token_slot, lane, *SHAPE[1:])
                assert head_slot == arena[layer, token_slot, lane]
                assert token_slot_of(head_slot, *SHAPE[1:]) == token_slot


def test_tensors_are_broadcast_and_left_alone() -> None:
    layers, slots, lanes = torch.arange(3)[:, None, None], torch.arange(7)[:, None], torch.arange(5)
    copies = [x.clone() for x in (layers, slots, lanes)]
    assert head_slot_of(layers, slots, lanes, *SHAPE[1:]).equal(torch.arange(3 * 7 * 5).view(SHAPE))
    assert head_slot_of(0, slots.int(), 0, *SHAPE[1:]).dtype == torch.int32
    assert all(x.equal(copy) for x, copy in zip((layers, slots, lanes), copies, strict=True))
