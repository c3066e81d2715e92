"""Segments with rows of 16 and of 4 bits: which entries get which, where they lie, and what is read of them."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor

from helpers.decisions import run_of_entries
from helpers.encoded import read_as_near
from helpers.packing import ordered
from helpers.statistics import random_coding
from kvevict_kernels.recode_rows import encoded_rows
from kvevict_kernels.row_codec import read_rows
from sgl_kvevict.config import Bits
from sgl_kvevict.errors import InvariantError
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.segments import (
    Packed,
    Segment,
    SegmentPacker,
    Sources,
    Span,
    TokenRange,
    View,
)

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
        bits, runs = torch.full_like(every, 16, dtype=torch.int8), every // 2 // SLOTS * 2 + every % 2
        self.coded = encoded_rows(*self.before, every, bits, runs, self.coding)

    def tokens(self, first: int = 0, end: int = NUM_TOKENS) -> TokenRange:
        return TokenRange(self.token_slots[first:end], START + first, self.keys[..., first:end])

    def segment(
        self, num_slots: int, bits: Bits, first: int = 0, end: int = NUM_TOKENS, num_sink_tokens: int = 0
    ) -> Segment:
        """A part of the tokens, ranked, in so many slots."""
        sources = Sources(self.geometry, [self.tokens(first, end)]).best(num_slots, bits, num_sink_tokens)
        written = self.packer.rewrite(sources, sources.fewest_slots)
        return Segment(self.geometry, START + first, START + end, written.packed, written.kept.keys)

    def resize(self, segment: Segment, num_slots: int, num_sink_tokens: int = 0) -> Tensor:
        sources = Sources(self.geometry, [segment.live_view]).best(num_slots, "auto", num_sink_tokens)
        written = self.packer.rewrite(sources, num_slots)
        segment.pack(written.packed, segment.end, written.kept)
        return written.freed

    def check(self, segment: Segment) -> dict[int, int]:
        """Check all entries, byte for byte, however often they were moved; return their number by width."""
        packed, known, first = segment.packed, segment.keys, 0
        check_places(self.geometry, packed)
        assert known is not None
        for part in packed.parts:
            runs = run_of_entries(part.indptr)
            tokens = part.positions.long() - START
            ascends = (part.positions.diff() > 0) | (runs.diff() > 0)
            assert ascends.all()
            assert known[first : first + part.num_entries].equal(self.keys[runs // 2, runs % 2, tokens])
            first += part.num_entries
            rows = (runs // 2 * SLOTS + self.token_slots[tokens]) * 2 + runs % 2  # where they lay at first
            for is_v, (arena, before) in enumerate(zip(self.arenas, self.before, strict=True)):
                if part.bits == 16:
                    assert read_rows(arena, part.rows).equal(read_rows(before, rows))
                    continue
                assert read_rows(arena, part.rows, self.coding.steps(is_v)).equal(self.coded[is_v][rows])
                found = self.coding.load(arena, part.rows, runs, is_v=bool(is_v))
                assert read_as_near(found, before.view(-1, 32)[rows], *self.coding.statistics.of_runs(runs)[is_v])
        assert first == segment.num_entries == known.numel()
        return {part.bits: part.num_entries for part in packed.parts}


def check_places(geometry: KVGeometry, packed: Packed) -> None:
    """No two entries have bytes in common, and all are inside the segment's slots."""
    owned = Counter[tuple[int, int]]()
    for part in packed.parts:
        per_slot = geometry.rows_per_slot(part.bits)
        for row in part.rows.tolist():
            head_slot, place = divmod(row, per_slot)
            owned[head_slot, -1 if per_slot == 1 else part.bits * 100 + place] += 1
            owned[head_slot, -2] = part.bits  # rows of one width share a head slot
            assert head_slot // geometry.num_kv_heads % geometry.num_token_slots in packed.token_slots.tolist()
    widths = {
        head_slot: {bits for (slot, place), bits in owned.items() if slot == head_slot and place == -2}
        for head_slot, _ in owned
    }
    assert all(len(each) == 1 for each in widths.values())
    assert all(count == 1 for (_, place), count in owned.items() if place != -2)


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
    num_slots = NUM_TOKENS // world.geometry.rows_per_slot(width)
    sources = Sources(world.geometry, [TokenRange(world.token_slots, START)])
    small = world.packer.rewrite(sources.best(num_slots, bits), num_slots)
    assert small.kept.keys is None
    segment = Segment(world.geometry, START, START + NUM_TOKENS, small.packed)
    ordered(segment, world.keys.flatten())
    assert world.check(segment) == {width: 160}
    segment.keys = None
    with pytest.raises(InvariantError, match="without an order"):
        Sources(world.geometry, [segment.live_view]).best(num_slots - 1, bits)
    with pytest.raises(InvariantError, match="without an order"):
        sources.best(15, "auto", START + 1)  # of two widths


@pytest.mark.parametrize(("cut", "bits"), [(1, "auto"), (13, "auto"), (39, "auto"), (13, 16)])
def test_views_of_a_segment_have_the_rows_of_their_tokens(world: World, cut: int, bits: Bits) -> None:
    segment = world.segment(8, bits, num_sink_tokens=START + 2)
    assert [part.bits for part in segment.packed.parts] == ([16] if bits == 16 else [16, 4])
    upper, lower = Span(segment, START, START + NUM_TOKENS, is_owner=True).split(START + cut)
    for part, above, below in zip(segment.packed.parts, upper.runs(), lower.runs(), strict=True):
        assert above.bits == below.bits == part.bits and above.rows is below.rows is part.rows
        assert (above.starts.flatten() + above.lens.flatten()).equal(below.starts.flatten())
        assert (above.lens + below.lens).flatten().equal(part.indptr.diff())
    assert [runs.is_counted for runs in upper.runs()] == [True] + [False] * (len(segment.packed.parts) - 1)


@pytest.mark.parametrize("bits", ["auto", 16])
def test_a_repack_moves_bytes_and_keeps_widths(world: World, bits: Bits) -> None:
    """The entries of the first 17 tokens go on as they are."""
    segment = world.segment(8, bits, num_sink_tokens=START + 2)
    end = START + 17
    counts = [int((part.positions < end).sum()) for part in segment.packed.parts]
    sources = Sources(world.geometry, [View(segment, START, end)])
    assert sources.counts == tuple(counts)
    written = world.packer.rewrite(sources, sources.fewest_slots)
    segment.pack(written.packed, end, written.kept)
    found = world.check(segment)
    assert list(found.values()) == counts and segment.live_counts == tuple(counts)


def test_segments_of_several_widths_become_one(world: World) -> None:
    """Rows of one width come together; then the best of both are kept, in rows no wider than they were."""
    upper, lower = world.segment(20, "auto", 0, 20), world.segment(4, "auto", 20)
    views = [upper.live_view, lower.live_view]
    num_slots = upper.num_slots + lower.num_slots
    written = world.packer.rewrite(Sources(world.geometry, views), num_slots)
    joined = Segment(world.geometry, START, START + NUM_TOKENS, written.packed, written.kept.keys)
    assert world.check(joined) == {16: 80, 4: 64}
    world.resize(joined, 8)
    assert world.check(joined) == {4: 128} and joined.num_slots == 8


def test_after_another_order_no_row_gets_more_bits(world: World) -> None:
    """More tokens are sinks, and the order is turned around: of what has 4 bits the best are kept, and stay so."""
    segment = world.segment(8, "auto", num_sink_tokens=START + 2)
    wide = segment.packed.parts[0].num_entries
    assert world.check(segment) == {16: wide, 4: (32 - 8) * 4} and wide == 8
    world.keys = -world.keys
    assert segment.keys is not None
    segment.keys = -segment.keys
    sinks, others = (keys.sort(descending=True).values for keys in segment.keys.tensor_split([wide]))
    world.resize(segment, 6, START + 20)
    kept = world.check(segment)
    assert kept == {16: 8, 4: (24 - 8) * 4} and segment.keys is not None
    own, rest = segment.keys.tensor_split([8])
    assert own.sort(descending=True).values.equal(sinks)
    assert rest.sort(descending=True).values.equal(others[: kept[4]])


def test_without_statistics_rows_have_16_bits(world: World) -> None:
    packer = SegmentPacker(world.geometry, *world.arenas)
    sources = Sources(world.geometry, [world.tokens()]).best(8, "auto")
    with pytest.raises(InvariantError, match="accounting was interrupted by ValueError: coding"):
        packer.rewrite(sources, 8)


def test_sinks_have_16_bits_in_every_head(world: World) -> None:
    """Whatever the order says of them; a segment that begins later has none."""
    world.keys[..., :2] = 2**15 - 1
    world.keys[..., 20:24] = 2**15 - 1
    tokens = TokenRange(world.token_slots, 0, world.keys)
    sources = Sources(world.geometry, [tokens]).best(8 + 2, "auto", 2)
    written = world.packer.rewrite(sources, sources.fewest_slots)
    segment = Segment(world.geometry, 0, NUM_TOKENS, written.packed, written.kept.keys)
    for num_slots in (8 + 2, 4 + 2):
        small = Sources(world.geometry, [segment.live_view]).best(min(num_slots, segment.num_slots), "auto", 2)
        segment.pack((again := world.packer.rewrite(small, small.fewest_slots)).packed, NUM_TOKENS, again.kept)
        first = segment.packed.parts[0]
        assert first.bits == 16 and first.positions.tolist() == [0, 1] * RUNS
        rows = world.arenas[0].view(-1, 32)[first.rows.long()]
        layers, heads = run_of_entries(first.indptr) // 2, run_of_entries(first.indptr) % 2
        assert rows.equal(world.before[0][layers, world.token_slots[first.positions.long()], heads])
    assert 16 not in {kept.bits for kept in Sources(world.geometry, [world.tokens()]).best(8, "auto", 2).kept}


def test_ranks_that_have_rows_of_different_widths_count_equally_many_bytes(world: World) -> None:
    """After a cut one rank may have rows of 16 bits alone, and another one some of 4: what has room is up to slots."""
    wide, narrow = world.segment(NUM_TOKENS, "auto"), world.segment(14, "auto")
    assert [part.bits for part in wide.packed.parts] == [16] and narrow.packed.parts[-1].bits == 4
    num_bytes = world.packer.bytes_of
    assert num_bytes(wide) * narrow.num_slots == num_bytes(narrow) * wide.num_slots
