"""Segments with rows of 16 or of 4 bits: where their entries and sinks lie, and what is read of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers.encoded import read_as_near
from helpers.packing import ordered
from helpers.statistics import random_coding
from kvevict_kernels.recode_rows import encoded_rows
from kvevict_kernels.row_codec import read_rows
from kvevict_kernels.row_sizes import ROWS_PER_SLOT
from sgl_kvevict.config import Bits
from sgl_kvevict.copies import CopiedEntries
from sgl_kvevict.errors import InvariantError
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.segments.packer import SegmentPacker
from sgl_kvevict.segments.segment import Packed, Segment, Span, View
from sgl_kvevict.segments.sources import Source, TokenRange

NUM_TOKENS, START, SLOTS = 40, 100, 64
RUNS = 4


class World:
    """A packer with statistics, and what was in the arenas at first, as it was and in rows of 4 bits."""

    def __init__(self) -> None:
        self.geometry = KVGeometry(2, 4, 2, 32, SLOTS)
        random = torch.Generator().manual_seed(5)
        self.arenas = [torch.randn(self.geometry.arena_shape, generator=random).bfloat16() for _ in range(2)]
        self.before = [arena.clone() for arena in self.arenas]
        self.coding = random_coding(self.geometry, self.arenas[0])
        self.packer = SegmentPacker(self.geometry, *self.arenas, coding=self.coding)
        self.token_slots = torch.randperm(SLOTS - 1, generator=random)[:NUM_TOKENS] + 1
        self.keys = (torch.randperm(RUNS * NUM_TOKENS, generator=random) - 80).to(torch.int16).view(2, 2, NUM_TOKENS)
        every = torch.arange(RUNS * SLOTS, dtype=torch.int32)
        self.coded = encoded_rows(*self.before, every, 16, every // 2 // SLOTS * 2 + every % 2, self.coding)

    def tokens(self, first: int = 0, end: int = NUM_TOKENS, num_sinks: int = 0) -> TokenRange:
        return TokenRange(self.token_slots[first:end], START + first, self.keys[..., first:end], num_sinks)

    def segment(self, num_slots: int, bits: Bits, first: int = 0, end: int = NUM_TOKENS, num_sinks: int = 0) -> Segment:
        """A part of the tokens, ranked, in so many slots."""
        source = Source(self.geometry, self.tokens(first, end, num_sinks)).best(num_slots, bits)
        packed, _ = self.packer.rewrite(source, source.fewest_slots)
        return Segment(self.geometry, START + first, START + end, packed)

    def resize(self, segment: Segment, num_slots: int) -> Tensor:
        source = Source(self.geometry, segment.live_view).best(num_slots, "auto")
        packed, freed = self.packer.rewrite(source, num_slots)
        segment.pack(packed, segment.end)
        return freed

    def check(self, segment: Segment) -> dict[int, int]:
        """Check all entries, byte for byte, however often they were moved; return their number by width."""
        packed, known = segment.packed, segment.keys
        check_places(self.geometry, packed)
        assert known is not None
        for part in segment.runs_of(segment.start, segment.end):
            lens = part.lens.flatten()
            assert part.positions is not None and part.starts.flatten().equal(lens.cumsum(0).int() - lens)
            runs = torch.arange(RUNS).repeat_interleave(lens)
            tokens = part.positions.long() - START
            ascends = (part.positions.diff() > 0) | (runs.diff() > 0)
            assert ascends.all() and len(runs) == len(tokens)
            if part.rows is packed.rows.rows:
                assert known.equal(self.keys[runs // 2, runs % 2, tokens])
            else:
                assert part.positions.tolist() == [*range(segment.start, segment.sink_end)] * RUNS
            rows = (runs // 2 * SLOTS + self.token_slots[tokens]) * 2 + runs % 2  # where they lay at first
            for is_v, (arena, before) in enumerate(zip(self.arenas, self.before, strict=True)):
                if part.bits == 16:
                    assert read_rows(arena, part.rows).equal(read_rows(before, rows))
                    continue
                assert read_rows(arena, part.rows, self.coding.steps(is_v)).equal(self.coded[is_v][rows])
                found = self.coding.load(arena, part.rows, runs, is_v=bool(is_v))
                statistics = self.coding.statistics.of_runs(runs, is_v=bool(is_v))
                assert read_as_near(found, before.view(-1, 32)[rows], *statistics)
        assert segment.num_entries == sum(segment.entries_by_bits.values())
        return segment.entries_by_bits


def check_places(geometry: KVGeometry, packed: Packed) -> None:
    """No two entries have bytes in common, and all are inside the segment's slots, behind those of its sinks."""
    rows, per_slot = packed.rows.rows, ROWS_PER_SLOT[packed.rows.bits]
    assert rows.unique().numel() == rows.numel()
    slots = rows // per_slot // geometry.num_kv_heads % geometry.num_token_slots
    assert torch.isin(slots, packed.token_slots[packed.num_sinks :]).all()
    assert packed.token_slots.unique().numel() == packed.token_slots.numel()


@pytest.fixture
def world() -> World:
    return World()


def test_each_resize_takes_bits_first_then_entries(world: World) -> None:
    """Of 40 tokens: all with 16 bits, then all with 4, then fewer; the same as from the whole range at once."""
    segment = world.segment(NUM_TOKENS, "auto")
    assert world.check(segment) == {16: 160}
    assert world.resize(segment, 12).numel() == 40 - 12
    assert world.check(segment) == {4: 160}
    best = world.keys.flatten().sort(descending=True).values
    for num_slots, want in ((8, {4: 128}), (4, {4: 64})):
        assert world.resize(segment, num_slots).numel() == 4
        assert world.check(segment) == want
        assert segment.keys is not None
        assert segment.keys.sort(descending=True).values.equal(best[: segment.num_entries])


@pytest.mark.parametrize(("bits", "width"), [(16, 16), ("auto", 4)])
def test_a_range_gets_rows_of_one_width_without_an_order(world: World, bits: Bits, width: int) -> None:
    num_slots = NUM_TOKENS // ROWS_PER_SLOT[width]
    source = Source(world.geometry, TokenRange(world.token_slots, START))
    small, _ = world.packer.rewrite(source.best(num_slots, bits), num_slots)
    segment = Segment(world.geometry, START, START + NUM_TOKENS, small)
    assert segment.keys is None
    ordered(segment, world.keys.flatten())
    assert world.check(segment) == {width: 160}
    ordered(segment, None)
    with pytest.raises(InvariantError, match="without an order"):
        Source(world.geometry, segment.live_view).best(num_slots - 1, bits)


@pytest.mark.parametrize(("cut", "bits"), [(1, "auto"), (2, "auto"), (13, "auto"), (39, "auto"), (13, 16)])
def test_views_of_a_segment_have_the_rows_of_their_tokens(world: World, cut: int, bits: Bits) -> None:
    """All of sinks, of which each half has those before or behind the cut."""
    num_sinks = 2 if bits == "auto" else 0
    segment = world.segment(8, bits, num_sinks=num_sinks)
    rows = segment.packed.rows
    halves = Span(segment, START, START + NUM_TOKENS, is_owner=True).split(START + cut)
    lens = torch.zeros(RUNS, dtype=torch.int32)
    for half in halves:
        assert sum(runs.num_tokens for runs in half.runs()) == half.num_tokens
        for runs in half.runs():
            if runs.rows is rows.rows:
                assert (runs.starts.flatten() - lens).equal(rows.indptr[:-1]) and runs.bits == rows.bits
                lens += runs.lens.flatten()
                continue
            first, end = half.start, min(half.end, START + num_sinks)
            assert runs.bits == 16 and runs.positions.tolist() == [*range(first, end)] * RUNS
            layers, heads = torch.arange(RUNS).repeat_interleave(end - first).view(1, -1) // torch.tensor([[2], [1]])
            slots = world.token_slots[runs.positions.long() - START]
            assert runs.rows.tolist() == ((layers * SLOTS + slots) * 2 + heads % 2).tolist()
    assert lens.equal(rows.indptr.diff())
    assert [len(half.runs()) for half in halves] == (
        [2 if cut > 2 else 1, 2 if cut < 2 else 1] if num_sinks else [1, 1]
    )


@pytest.mark.parametrize("bits", ["auto", 16])
@pytest.mark.parametrize("num_tokens", [17, 1])
def test_a_repack_moves_bytes_and_keeps_widths(world: World, bits: Bits, num_tokens: int) -> None:
    """The entries of the first tokens go on as they are; of one token, which is a sink, nothing else."""
    segment, end = world.segment(8, bits, num_sinks=2 if bits == "auto" else 0), START + num_tokens
    held, count = segment.packed.token_slots, int((segment.packed.rows.positions < end).sum())
    sinks = held[: min(segment.packed.num_sinks, num_tokens)]
    source = Source(world.geometry, View(segment, START, end))
    assert source.count == count
    packed, freed = world.packer.rewrite(source, source.fewest_slots)
    segment.pack(packed, end)
    assert world.check(segment).get(4 if bits == "auto" else 16, 0) == count == segment.live_count
    assert segment.packed.token_slots[: len(sinks)].equal(sinks) and segment.packed.num_sinks == len(sinks)
    both = torch.cat([segment.packed.token_slots, freed])
    assert both.equal(held)


def test_segments_of_several_widths_are_copied_as_one(world: World) -> None:
    """In rows of the fewest bits, with the sinks of each."""
    upper, lower = world.segment(20, "auto", 0, 20, num_sinks=3), world.segment(4, "auto", 20)
    assert (world.check(upper), world.check(lower)) == ({16: 80}, {4: 64})
    copied = world.packer.copy([Source(world.geometry, each.live_view) for each in (upper, lower)])
    joined = world.packer.new_segment(torch.arange(41, 64)[: world.packer.slots_of(copied)], copied, START, START + 40)
    assert world.check(joined) == {16: 12, 4: 68 + 64} and joined.num_slots == 3 + 9
    world.resize(joined, 8)
    assert world.check(joined) == {16: 12, 4: 5 * 16} and joined.num_slots == 8


@pytest.mark.parametrize("cut", [1, 2, 5])
def test_a_part_of_a_segment_is_copied_with_its_sinks(world: World, cut: int) -> None:
    """Those of its own tokens; what goes on behind it has further ones."""
    upper = world.segment(8, "auto", 0, 30, num_sinks=3)
    first = world.packer.copy([Source(world.geometry, View(upper, START, START + cut))])
    for arena, before in zip(world.arenas, world.before, strict=True):  # the tokens that go on have slots of their own
        arena.copy_(before)
    lower = world.segment(6, "auto", cut, 40, num_sinks=max(3 - cut, 0))
    copied = CopiedEntries.joined([first, world.packer.copy([Source(world.geometry, lower.live_view)])])
    assert copied.num_sinks == 3
    free = torch.tensor([slot for slot in range(1, SLOTS) if slot not in world.token_slots.tolist()])
    assert world.check(world.packer.new_segment(free, copied, START, START + 40))[16] == 3 * RUNS


def test_what_was_evicted_comes_back_among_the_others(world: World) -> None:
    """In slots of its own, without a row that moves."""
    source = Source(world.geometry, world.tokens(num_sinks=2)).best(6, "auto")
    evicted = world.packer.copied(source.evicted(4), 4)
    segment = world.segment(6, "auto", num_sinks=2)
    before = segment.packed.rows.rows
    assert evicted.num_entries == RUNS * (40 - 2 - 16)
    free = torch.tensor([slot for slot in range(1, SLOTS) if slot not in world.token_slots.tolist()])
    packed = world.packer.extended(segment.packed, evicted, free[: world.geometry.slots_for(evicted.num_entries, 4)])
    segment.grow(packed)
    assert torch.isin(before, packed.rows.rows).all() and packed.token_slots.numel() == 6 + 6
    assert world.check(segment) == {16: 8, 4: RUNS * 38}
    assert len(segment.runs_of(START, START + 40)) == 2
    world.resize(segment, 6)
    assert world.check(segment) == {16: 8, 4: 64}
    with pytest.raises(InvariantError, match=r"rows of \[4, 16\] bits"):
        world.packer.extended(world.segment(40, "auto").packed, evicted, free)


def test_without_statistics_rows_have_16_bits(world: World) -> None:
    packer = SegmentPacker(world.geometry, *world.arenas)
    source = Source(world.geometry, world.tokens()).best(8, "auto")
    with pytest.raises(InvariantError, match="rows of 4 bits in a pool without statistics"):
        packer.rewrite(source, 8)


def test_sinks_stay_what_they_are(world: World) -> None:
    """In every head, in their own slots, whatever the order says of them; and they are all that may be left."""
    world.keys[..., :2] = -(2**15)
    slots = world.token_slots[:2].clone()
    segment = world.segment(8 + 2, "auto", num_sinks=2)
    for num_slots, kept in ((8 + 2, {16: 8, 4: 128}), (4 + 2, {16: 8, 4: 64}), (2, {16: 8})):
        world.resize(segment, num_slots)
        assert world.check(segment) == kept and segment.packed.token_slots[:2].equal(slots)
    with pytest.raises(InvariantError, match="in 2 slots cannot shrink to 1 slots"):
        world.resize(segment, 1)


def test_ranks_that_have_rows_of_different_widths_count_equally_many_bytes(world: World) -> None:
    """After a cut one rank may have rows of 16 bits alone, and another one some of 4: what has room is up to slots."""
    wide, narrow = world.segment(NUM_TOKENS, "auto"), world.segment(14, "auto")
    assert (wide.packed.rows.bits, narrow.packed.rows.bits) == (16, 4)
    num_bytes = world.packer.bytes_of
    assert num_bytes(wide) * narrow.num_slots == num_bytes(narrow) * wide.num_slots


def test_without_memory_of_the_device_nothing_is_written(monkeypatch):
    """All that a rewrite needs is allocated first, so that such an error is one of its prefix, not of the server."""
    world = World()
    segment = world.segment(20, "auto", num_sinks=4)
    bits = [arena.view(torch.int16) for arena in world.arenas]  # of codes some would be NaN as numbers
    before = [each.clone() for each in bits]

    def fail(*args: object) -> Tensor:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr("sgl_kvevict.segments.sources.runs_of", fail)
    with pytest.raises(torch.OutOfMemoryError):
        world.resize(segment, 10)
    assert all(map(torch.equal, bits, before))
    monkeypatch.undo()
    world.resize(segment, 10)
    world.check(segment)
