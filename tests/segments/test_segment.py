"""Segments and spans without SGLang: packing, splitting, accounting, repacking."""

from __future__ import annotations

import pytest
import torch

from helpers.packing import pack, repack, selected
from kvevict_kernels.row_sizes import head_slot_of
from sgl_kvevict.errors import InvariantError
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.segments.packer import SegmentPacker
from sgl_kvevict.segments.segment import Span

GEOMETRY = KVGeometry(num_layers=3, num_qo_heads=10, num_kv_heads=5, head_dim=4, num_token_slots=64)
START = 100


@pytest.fixture
def store():
    """An arena in which every row names its token slot, layer and lane."""
    ids = torch.arange(GEOMETRY.num_head_slots, dtype=torch.float32).view(*GEOMETRY.arena_shape[:3], 1)
    k = ids.expand(GEOMETRY.arena_shape).contiguous()
    return SegmentPacker(GEOMETRY, k, -k)


def make_selection(num_tokens, keep_lens, seed=0):
    """Keep a pseudo-random ascending set of the given sizes."""
    generator = torch.Generator().manual_seed(seed)
    indices = [torch.randperm(num_tokens, generator=generator)[:n].sort().values.tolist() for n in keep_lens]
    return selected(*indices, num_heads=GEOMETRY.num_kv_heads), indices


@pytest.fixture
def whole(store):
    """A span of all tokens of a segment."""
    segment, _ = pack(store, torch.arange(1, 21), START, make_selection(20, [4] * 15)[0])
    return Span(segment, START, START + 20, is_owner=True)


def read(store, span):
    """(position, original head slot) of every entry of every run, read back from the arena."""
    (runs,) = span.runs()
    entries = []
    for begin, length in zip(runs.starts.flatten().tolist(), runs.lens.flatten().tolist(), strict=True):
        slots = runs.rows[begin : begin + length].long()
        k = store.k_arena.view(-1, GEOMETRY.head_dim)[slots]
        v = store.v_arena.view(-1, GEOMETRY.head_dim)[slots]
        assert torch.equal(k, -v)
        positions = span.segment.packed.rows.positions[begin : begin + length].tolist()
        entries.append(list(zip(positions, k[:, 0].tolist(), strict=True)))
    return entries


def expected(indices, token_slots):
    runs = []
    for run, kept in enumerate(indices):
        layer, lane = divmod(run, GEOMETRY.num_kv_heads)
        runs.append([(START + i, float(head_slot_of(layer, int(token_slots[i]), lane, 64, 5))) for i in kept])
    return runs


KEEP_LENS = [
    [4] * 15,
    [0, 20, 1, 3, 6, 0, 0, 20, 20, 2, 5, 5, 5, 5, 8],
    [1] + [0] * 14,
    [0] * 14 + [20],
    [20] * 15,
]


@pytest.mark.parametrize("keep_lens", KEEP_LENS)
def test_packing_wastes_nothing_and_keeps_every_entry(store, keep_lens):
    token_slots = torch.randperm(63)[:20] + 1
    selection, indices = make_selection(20, keep_lens)
    segment, freed = pack(store, token_slots, START, selection)
    assert segment.num_slots == -(-sum(keep_lens) // 15)
    assert sorted(segment.packed.token_slots.tolist() + freed.tolist()) == sorted(token_slots.tolist())
    span = Span(segment, START, START + 20, is_owner=True)
    assert read(store, span) == expected(indices, token_slots)


def test_packing_touches_no_other_slot(store):
    before = store.k_arena.clone()
    token_slots = torch.arange(10, 30)
    segment, _ = pack(store, token_slots, START, make_selection(20, KEEP_LENS[1])[0])
    others = torch.ones(64, dtype=torch.bool)
    others[segment.packed.token_slots] = False
    assert torch.equal(store.k_arena[:, others], before[:, others])


@pytest.mark.parametrize("cuts", [(1,), (7,), (19,), range(1, 20)], ids=str)
def test_splits_are_views_of_their_tokens(store, cuts):
    token_slots = torch.arange(1, 21)
    selection, indices = make_selection(20, KEEP_LENS[1])
    segment, _ = pack(store, token_slots, START, selection)
    spans, want = [Span(segment, START, START + 20, is_owner=True)], expected(indices, token_slots)
    for cut in cuts:
        spans += spans.pop().split(START + cut)
    assert [span.end - START for span in spans] == [*cuts, 20]
    for span in spans:
        assert read(store, span) == [[e for e in run if span.start <= e[0] < span.end] for run in want]
        assert span.runs()[0].rows is segment.packed.rows.rows
    assert [span.charged_slots for span in spans] == [segment.num_slots] + [0] * len(cuts)
    assert segment.num_spans == len(spans)


@pytest.mark.parametrize("position", [START, START + 20, START - 1])
def test_split_outside_is_refused(whole, position):
    with pytest.raises(InvariantError, match="not inside"):
        whole.split(position)


def test_unsplittable_segment_refuses(whole):
    whole.segment.splittable = False
    with pytest.raises(InvariantError, match="cannot be split"):
        whole.split(START + 5)


def test_owner_goes_last(whole):
    upper, lower = whole.split(START + 5)
    lower.drop()
    upper.drop()
    assert not whole.segment.num_spans


def test_owner_going_first_is_an_error(whole):
    upper, _lower = whole.split(START + 5)
    with pytest.raises(InvariantError, match="before 1 others"):
        upper.drop()


@pytest.mark.parametrize("cuts", [(1,), (7,), (3, 11), (19,)])
@pytest.mark.parametrize("keep_lens", KEEP_LENS)
def test_repack_keeps_what_live_spans_read_and_frees_the_rest(store, cuts, keep_lens):
    token_slots = torch.randperm(63, generator=torch.Generator().manual_seed(1))[:20] + 1
    selection, _ = make_selection(20, keep_lens)
    segment, _ = pack(store, token_slots, START, selection)
    rest = Span(segment, START, START + 20, is_owner=True)
    spans = []
    for cut in cuts:
        upper, rest = rest.split(START + cut)
        spans.append(upper)
    before = [read(store, span) for span in spans]
    rest.drop()
    held = segment.packed.token_slots
    freed = repack(store, segment, spans[-1].end)
    assert [read(store, span) for span in spans] == before
    live = sum(len(run) for span in before for run in span)
    assert segment.num_slots == -(-live // 15) and segment.num_spans == len(spans)
    assert sorted(segment.packed.token_slots.tolist() + freed.tolist()) == sorted(held.tolist())


def test_values_inside_keys_rows_are_packed_with_them():
    geometry = KVGeometry(num_layers=3, num_qo_heads=4, num_kv_heads=1, head_dim=6, num_token_slots=64, latent_dim=4)
    k = torch.randn(geometry.arena_shape)
    before = k.clone()
    store = SegmentPacker(geometry, k, k[..., : geometry.latent_dim])
    token_slots = torch.randperm(63)[:20] + 1
    kept = [torch.randperm(20)[:n].sort().values.tolist() for n in (5, 9, 7)]
    segment, _ = pack(store, token_slots, START, selected(*kept, num_heads=1))
    want = torch.cat([before[layer, token_slots[indices], 0] for layer, indices in enumerate(kept)])
    assert torch.equal(store.k_arena.flatten(0, 2)[segment.packed.rows.rows], want)
    assert torch.equal(store.v_arena.flatten(0, 2)[segment.packed.rows.rows], want[:, :4])


@pytest.mark.parametrize("latent_dim", [-1, 7])
def test_a_latent_is_a_part_of_a_row(latent_dim):
    with pytest.raises(ValueError, match=r"latent_dim: expected 0 to 6 \(head_dim\)"):
        KVGeometry(num_layers=1, num_qo_heads=1, num_kv_heads=1, head_dim=6, num_token_slots=8, latent_dim=latent_dim)
