"""Values and biases of fitted segments: they lie with their entries, wherever these go."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers.fitted import biases_of, rows_of
from sgl_kvevict.errors import InvariantError
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.prefix import Segment, SegmentPacker, Span
from sgl_kvevict.ragged import Selection

GEOMETRY = KVGeometry(num_layers=2, num_qo_heads=3, num_kv_heads=3, head_dim=4, num_token_slots=64)
START, NUM_TOKENS = 50, 20
KEEP_LENS = [0, 20, 3, 8, 12, 6]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(3)


def make_store() -> SegmentPacker:
    """An arena of random rows; biases of head slots that nobody uses are NaN."""
    k, v = torch.randn(2, GEOMETRY.num_layers, GEOMETRY.num_token_slots, GEOMETRY.num_kv_heads, GEOMETRY.head_dim)
    return SegmentPacker(GEOMETRY, k, v, torch.full(k.shape[:3], torch.nan))


def pack(store: SegmentPacker) -> tuple[Segment, Span]:
    """A segment of uneven runs, and its only span."""
    indices = torch.cat([torch.randperm(NUM_TOKENS)[:n].sort().values for n in KEEP_LENS]).int()
    lens = torch.tensor(KEEP_LENS, dtype=torch.int32).view(2, 3)
    worth = torch.randperm(len(indices)).to(torch.int16)
    slots = torch.randperm(63)[:NUM_TOKENS] + 1
    segment, _ = store.pack(slots, START, Selection(lens, indices, len(indices)), worth=worth)
    return segment, Span(segment, START, START + NUM_TOKENS, is_owner=True)


def fit(store: SegmentPacker, segment: Segment) -> None:
    """Values and biases that name each entry's run and position."""
    names = named(segment)
    store.fit(segment, torch.ones(segment.num_entries, dtype=torch.bool), names[:, None].expand(-1, 4), -names)


def named(segment: Segment) -> Tensor:
    """[num_entries], float32, a number of its own for each run and position."""
    runs = torch.repeat_interleave(segment.indptr.diff().long())
    return (runs * 100 + segment.positions).float()


def assert_fitted(store: SegmentPacker, segment: Segment) -> None:
    """Every entry has its own fit."""
    biases = biases_of(store, segment)
    assert biases is not None
    assert torch.equal(biases, -named(segment))
    assert torch.equal(rows_of(store, segment)[1], named(segment)[:, None].expand(-1, 4))


def test_a_new_segment_has_biases_of_zero() -> None:
    """The slots may be those of a fitted one that was dropped."""
    store = make_store()
    segment, span = pack(store)
    assert not span.runs().is_fitted
    assert biases_of(store, segment) is None
    segment.is_fitted = True
    assert torch.equal(biases_of(store, segment), torch.zeros(segment.num_entries))


def test_entries_that_are_written_to_other_slots_have_biases_of_zero() -> None:
    """What a request generated goes into slots that may have been those of a fitted segment."""
    store = make_store()
    keep_lens = torch.full((2, 3), 4, dtype=torch.int32)
    sources = torch.cat([store.head_slots(layer, torch.arange(1, 5)).flatten() for layer in range(2)])
    positions = torch.arange(START, START + 4, dtype=torch.int32).repeat(6)
    segment, _ = store.write(torch.arange(1, 5), sources, keep_lens, positions, (START, START + 4))
    segment.is_fitted = True
    assert torch.equal(biases_of(store, segment), torch.zeros(24))


def test_readers_of_a_fitted_segment_get_other_runs() -> None:
    """What was laid out for the runs before does not read biases; entries and order stay."""
    store = make_store()
    segment, span = pack(store)
    keys = rows_of(store, segment)[0]
    before = span.runs()
    fit(store, segment)
    after = span.runs()
    assert (before.is_fitted, after.is_fitted) == (False, True)
    assert after is span.runs()
    assert torch.equal(before.head_slots, after.head_slots)
    assert torch.equal(rows_of(store, segment)[0], keys)
    assert_fitted(store, segment)


def test_a_part_of_the_entries_may_be_fitted() -> None:
    """The others keep their value, and no bias."""
    store = make_store()
    segment, _ = pack(store)
    values = rows_of(store, segment)[1]
    chosen = torch.rand(segment.num_entries) < 0.5
    store.fit(segment, chosen, torch.full_like(values, 7.0), torch.full((segment.num_entries,), 3.0))
    biases, now = biases_of(store, segment), rows_of(store, segment)[1]
    assert torch.equal(biases, torch.where(chosen, 3.0, 0.0))
    assert torch.equal(now, torch.where(chosen[:, None], 7.0, values))


def test_a_squeeze_and_a_repack_take_the_fit_along() -> None:
    """Other slots, fewer entries, a dropped lower part."""
    store = make_store()
    segment, span = pack(store)
    fit(store, segment)
    freed = store.squeeze([span], 5)
    assert freed.numel() == segment.num_slots - 5
    assert span.segment is not segment
    assert_fitted(store, span.segment)
    upper, lower = span.split(START + 9)
    assert upper.runs().is_fitted and lower.runs().is_fitted
    lower.drop()
    assert store.repack([upper]).numel() > 0
    assert_fitted(store, upper.segment)
    assert upper.runs().is_fitted


def test_a_stored_fit_comes_back_into_other_slots() -> None:
    """Rows and biases are placed together; one without a fit has biases of zero."""
    store = make_store()
    segment, _ = pack(store)
    fit(store, segment)
    k, v = rows_of(store, segment)
    lens = segment.indptr.diff().view(2, 3)
    for biases in (biases_of(store, segment), None):
        slots = torch.randperm(63)[: segment.num_slots] + 1
        placed = store.new_segment(slots, lens, segment.positions, START, START + NUM_TOKENS)
        store.place(placed, k, v, biases)
        assert placed.is_fitted is (biases is not None)
        if biases is not None:
            assert_fitted(store, placed)
        placed.is_fitted = True
        assert torch.equal(biases_of(store, placed), torch.zeros(segment.num_entries) if biases is None else biases)


def test_a_store_without_biases_fits_nothing() -> None:
    """An error of accounting, not something to go on after."""
    store = make_store()
    segment, _ = pack(store)
    bare = SegmentPacker(GEOMETRY, store.k_arena, store.v_arena)
    assert (store.has_biases, bare.has_biases) == (True, False)
    with pytest.raises(InvariantError, match="without biases"):
        fit(bare, segment)
    with pytest.raises(InvariantError, match="without biases"):
        bare.place(segment, *rows_of(store, segment), torch.zeros(segment.num_entries))
