"""A range of a path, packed or not, becomes a segment: each entry goes on with what is known of it."""

from __future__ import annotations

import pytest
import torch

from helpers.packing import kept_rows, ordered, pack, selected
from sgl_kvevict.errors import InvariantError
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.ragged import MergePlan
from sgl_kvevict.segments.packer import SegmentPacker
from sgl_kvevict.segments.segment import Order, Packed, Segment, Span, View
from sgl_kvevict.segments.sources import Source, TokenRange

GEOMETRY = KVGeometry(num_layers=2, num_qo_heads=4, num_kv_heads=2, head_dim=4, num_token_slots=64)
START = 100
LOOKED_UP = list[list[tuple[int, float]]]
"""Per run: position, and what the key says, of each entry."""


@pytest.fixture
def packer() -> SegmentPacker:
    """Every row names its position (slot + 100 - 1) and its run: ``position + run / 10``."""
    runs = torch.arange(4.0).view(2, 1, 2, 1) / 10
    rows = torch.arange(64.0).view(1, -1, 1, 1) + START - 1 + runs
    k = rows.expand(GEOMETRY.arena_shape).contiguous()
    return SegmentPacker(GEOMETRY, k, -k)


def packed(packer: SegmentPacker, first: int, count: int, *runs: list[int]) -> Segment:
    """Tokens ``first .. first + count`` of the path with an order: later entries come first."""
    chosen = selected(*runs)
    order = torch.arange(chosen.num_entries, dtype=torch.int16)
    return pack(packer, torch.arange(first + 1, first + count + 1), START + first, chosen, order=order)[0]


def whole(segment: Segment) -> View:
    return View(segment, segment.start, segment.end)


def read(packer: SegmentPacker, packed: Packed) -> LOOKED_UP:
    found, part = [], packed.rows
    for begin, end in zip(part.indptr[:-1].tolist(), part.indptr[1:].tolist(), strict=True):
        keys = packer.k_arena.flatten(0, 2)[part.rows[begin:end], 0].tolist()
        found.append(list(zip(part.positions[begin:end].tolist(), keys, strict=True)))
    return found


def named(*runs: list[int]) -> LOOKED_UP:
    """What :func:`read` finds if runs have these tokens of the path."""
    return [[(START + t, pytest.approx(START + t + run / 10, abs=1e-4)) for t in kept] for run, kept in enumerate(runs)]


FIRST = ([0, 3], [1], [], [2, 3])
SECOND = ([1], [], [0, 1, 2], [2])
BOTH = ((0, 4, FIRST), (4, 5, SECOND))


def test_a_copy_of_segments_of_a_path_is_that_of_one(packer: SegmentPacker) -> None:
    parts = [packed(packer, first, count, *runs) for first, count, runs in BOTH]
    copied = packer.copy([Source(GEOMETRY, whole(part)) for part in parts])
    assert copied.rows.order is not None and copied.rows.order.tolist() == [0, 1, 0, 2, 1, 2, 3, 3, 4, 4]
    joined = packer.new_segment(torch.tensor([40, 42, 41]), copied, START, START + 9)
    assert read(packer, joined.packed) == named([0, 3, 5], [1], [4, 5, 6], [2, 3, 6])
    assert joined.keys is not None and joined.keys.equal(copied.rows.order)
    ordered(parts[1], None)
    assert packer.copy([Source(GEOMETRY, whole(part)) for part in parts]).rows.order is None


def test_the_best_entries_are_kept(packer: SegmentPacker) -> None:
    """Of ten entries four: keys 4, 4, 3, 3."""
    parts = [Source(GEOMETRY, whole(packed(packer, first, count, *runs))) for first, count, runs in BOTH]
    joined = packer.new_segment(torch.tensor([40, 42, 41]), packer.copy(parts), START, START + 9)
    source = Source(GEOMETRY, whole(joined)).best(1)
    small, freed = packer.rewrite(source, source.fewest_slots)
    assert read(packer, small) == named([], [], [6], [2, 3, 6]) and freed.numel() == 2
    assert small.rows.keys is not None and small.rows.keys.tolist() == [3, 3, 4, 4]


def test_of_equal_entries_the_lower_run_and_position_is_kept(packer: SegmentPacker) -> None:
    segment = packed(packer, 0, 4, *FIRST)
    ordered(segment, torch.zeros(segment.num_entries, dtype=torch.int16))
    small, _ = packer.rewrite(Source(GEOMETRY, whole(segment)).best(1), 1)
    assert read(packer, small) == named([0, 3], [1], [], [2])


def test_what_is_not_kept_is_merged_into_what_is(packer: SegmentPacker) -> None:
    tokens = TokenRange(torch.arange(4, 9), START + 3)
    plan = MergePlan(
        indptr=torch.tensor([0, 1, 4], dtype=torch.int32),
        layers=torch.tensor([0, 1, 1, 1], dtype=torch.int32),
        heads=torch.tensor([0, 1, 1, 1], dtype=torch.int32),
        indices=torch.tensor([1, 4, 0, 2], dtype=torch.int32),
        weights=torch.tensor([1.0, 0.5, 0.25, 0.25]),
    )
    source = Source(GEOMETRY, tokens, kept_rows(selected([1], [], [], [4]), 5))
    merged = packer.rewrite(source, 1, merge=plan)[0].rows
    keys = packer.k_arena.flatten(0, 2)[merged.rows, 0].tolist()
    assert keys == pytest.approx([104.0, 0.5 * 107.3 + 0.25 * 103.3 + 0.25 * 105.3])
    assert merged.positions.tolist() == [104, 107]


def test_marks_go_on_with_a_segment(packer: SegmentPacker) -> None:
    segment = packed(packer, 0, 4, *FIRST)
    segment.splittable = False
    segment.pack(packer.rewrite(Source(GEOMETRY, whole(segment)).best(1), 1)[0], segment.end)
    assert segment.keys is not None and segment.keys.tolist() == [1, 2, 3, 4] and segment.num_live_entries == 4
    assert not segment.splittable


def test_tokens_in_place_have_an_order_by_run_and_token(packer: SegmentPacker) -> None:
    numbers = torch.arange(16).view(2, 2, 4)
    tokens = TokenRange(torch.arange(1, 5), START, numbers.to(torch.int16))
    best, _ = packer.rewrite(Source(GEOMETRY, tokens).best(1), 1)
    assert read(packer, best) == named([], [], [], [0, 1, 2, 3])
    assert best.rows.keys is not None and best.rows.keys.tolist() == [12, 13, 14, 15]


def test_an_order_is_cut_without_copies_and_before_it_is_known() -> None:
    keys = torch.arange(24, dtype=torch.int16).view(2, 2, 6)
    launched: list[bool] = []
    order = Order(lambda: launched.append(True) or keys, START, START + 6)  # type: ignore[func-returns-value]
    part = order.within(START + 1, START + 6).within(START + 2, START + 5)
    assert not launched and (part.start, part.end) == (START + 2, START + 5)
    assert part.keys.equal(keys[..., 2:5])
    assert part.keys.untyped_storage().data_ptr() == keys.untyped_storage().data_ptr()


def test_what_is_dead_is_not_kept(packer: SegmentPacker) -> None:
    """The slots of dead entries hold them, and go with the others; the number of live ones is read once."""
    segment = packed(packer, 0, 4, [0, 1, 2, 3], *FIRST[1:])
    _, lower = Span(segment, 100, 104, is_owner=True).split(103)
    lower.drop()
    view = View(segment, 100, 103)
    assert view.count is None
    segment.live_count, segment.live_end = 5, 103
    assert view.count == 5
    small, freed = packer.rewrite(Source(GEOMETRY, view).best(1), 1)
    assert read(packer, small) == named([1, 2], [1], [], [2]) and freed.numel() == 1


@pytest.mark.parametrize("num_slots", [3, 1, 0, -1])
def test_more_slots_than_there_are_and_too_few_are_refused(packer: SegmentPacker, num_slots: int) -> None:
    before = packer.k_arena.clone()
    kept = kept_rows(selected([0], [1], [0, 1], [1]), 2)
    source = Source(GEOMETRY, TokenRange(torch.tensor([1, 2]), START), kept)
    with pytest.raises(
        InvariantError, match=f"num_slots: got {num_slots} for 5 entries of a range of 2 slots; allowed: 2 to 2"
    ):
        packer.rewrite(source, num_slots)
    assert packer.k_arena.equal(before)


def test_entries_do_not_shrink_to_more_slots(packer: SegmentPacker) -> None:
    segment = packed(packer, 0, 4, *FIRST)
    with pytest.raises(InvariantError, match="entries in 2 slots cannot shrink to 3 slots"):
        Source(GEOMETRY, whole(segment)).best(3)
