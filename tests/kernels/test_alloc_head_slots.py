from __future__ import annotations

import pytest
import torch

from helpers.references import alloc_head_slots_reference
from helpers.tolerance import assert_same_bits
from kvevict_kernels.alloc_head_slots import alloc_head_slots
from kvevict_kernels.row_sizes import head_slot_of, token_slot_of

pytestmark = pytest.mark.usefixtures("poisoned_empty")

# num_layers, num_kv_heads, num_slots, per_slot; with several rows to a slot, the last may be filled in part
SHAPES = [
    *((1, 1, 0, 1), (1, 1, 1, 1), (2, 3, 63, 1), (5, 7, 100, 1), (30, 3, 20, 1), (3, 5, 1, 1), (350, 3, 2, 1)),
    *((4, 3, 20, 2), (4, 3, 20, 3), (5, 3, 7, 6)),
]


def ragged_lens(num_layers: int, num_kv_heads: int, num_slots: int) -> torch.Tensor:
    """Random run lengths with empty runs that fill all head slots of a segment but at most one token slot."""
    num_runs = num_layers * num_kv_heads
    total = max(0, num_slots * num_runs - int(torch.randint(num_runs, ())))
    lens = torch.bincount(torch.randint(num_runs, (total,)) ** 2 // num_runs, minlength=num_runs)
    return lens.view(num_layers, num_kv_heads).int()


@pytest.mark.parametrize(("num_layers", "num_kv_heads", "num_slots", "per_slot"), SHAPES)
def test_matches_reference(device: str, num_layers: int, num_kv_heads: int, num_slots: int, per_slot: int) -> None:
    lens = ragged_lens(num_layers, num_kv_heads, num_slots * per_slot).to(device)
    slots = torch.randperm(400, device=device)[:num_slots]
    total = int(lens.sum())
    indptr, rows = alloc_head_slots(lens, slots, 400, total, per_slot=per_slot)
    want_indptr, want_rows = alloc_head_slots_reference(lens, slots, 400, total, per_slot=per_slot)
    assert_same_bits("indptr", indptr, want_indptr)
    assert_same_bits("rows", rows, want_rows)


def test_worked_example(device: str) -> None:
    """Two layers, two heads, runs 3 0 / 1 2 in token slots 5 and 2 of an arena of 10: six of eight places."""
    lens = torch.tensor([[3, 0], [1, 2]], dtype=torch.int32, device=device)
    slots = torch.tensor([5, 2], device=device)
    indptr, head_slots = alloc_head_slots(lens, slots, 10, 6)
    assert indptr.tolist() == [0, 3, 3, 4, 6]
    assert head_slots.tolist() == [10, 11, 4, 5, 30, 31]  # layer 0: slots 5, 2; layer 1 starts at 10 * 2


def test_ids_near_the_int32_limit_do_not_wrap(device: str) -> None:
    num_token_slots = 2**31 // 256 - 1024
    lens = torch.full((32, 8), 1, dtype=torch.int32, device=device)
    slots = torch.tensor([num_token_slots - 1], device=device)
    _, head_slots = alloc_head_slots(lens, slots, num_token_slots, 256)
    assert int(head_slots[-1]) == 32 * num_token_slots * 8 - 1


LENS = torch.tensor([[2, 1]], dtype=torch.int32)
SLOTS = torch.tensor([0, 3])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((LENS.long(), SLOTS, 9, 3), "keep_lens: expected dtype int32, got int64"),
        ((LENS[0], SLOTS, 9, 3), r"keep_lens: expected shape \[any, any\], got \[2\]"),
        ((LENS - 2, SLOTS, 9, 0), "keep_lens: expected lengths >= 0, got -1"),
        ((LENS, SLOTS.int(), 9, 3), "token_slots: expected dtype int64, got int32"),
        ((LENS, SLOTS, 3, 3), r"token_slots: expected indices in \[0, 3\), got 0 to 3"),
        ((LENS, [0, 3], 9, 3), r"token_slots: expected a tensor \[any\], got list"),
        ((LENS, SLOTS, 0, 3), "num_token_slots: expected an int >= 1, got 0"),
        ((LENS, SLOTS, 2**30, 3), "num_token_slots: expected at most 2147482624 rows in all"),
        ((LENS, SLOTS, 9, 5), "num_entries: expected an int >= 0 and <= 4, got 5"),
        ((LENS, SLOTS, 9, 2), r"num_entries: expected keep_lens.sum\(\) = 3, got 2"),
        ((LENS, SLOTS, 9, True), "num_entries: expected an int"),
        ((LENS, SLOTS, 9, 3, 0), "per_slot: expected an int >= 1, got 0"),
        ((LENS, SLOTS, 2**29, 3, 3), "num_token_slots: expected at most 2147482624 rows in all, got 3221225472"),
        ((LENS, SLOTS, 9, 13, 3), "num_entries: expected an int >= 0 and <= 12, got 13"),
        ((LENS.to("meta"), SLOTS.to("meta"), 9, 3), "device: expected cuda or cpu, got meta"),
    ],
)
def test_bad_arguments_are_named(args: tuple[object, ...], message: str) -> None:
    options = dict(zip(("per_slot",), args[4:], strict=False))
    with pytest.raises(ValueError, match=message):
        alloc_head_slots(*args[:4], **options)  # type: ignore[arg-type]


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
