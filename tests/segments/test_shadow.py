"""Rows of a draft model lie in the slots of compressed tokens, follow their segment, and belong to the right tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers.packing import kept_rows, pack, repack, resize, selected
from sgl_kvevict.copies import CopiedEntries, CopiedRows
from sgl_kvevict.errors import InvariantError
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.segments.packer import SegmentPacker
from sgl_kvevict.segments.segment import Span, View
from sgl_kvevict.segments.shadow import DraftRows
from sgl_kvevict.segments.sources import Source, TokenRange

TARGET = KVGeometry(num_layers=2, num_qo_heads=2, num_kv_heads=2, head_dim=4, num_token_slots=64)
DRAFT = KVGeometry(num_layers=2, num_qo_heads=4, num_kv_heads=2, head_dim=8, num_token_slots=64)
START, TOKENS = 100, 12
FIRST = 20
"""Slot of the first token."""
SLOTS = torch.arange(FIRST, FIRST + TOKENS)


class World:
    """Packs twelve tokens; every row of the draft's keys names its slot, and its run: ``layer * 2 + head``."""

    def __init__(self):
        slots, runs = torch.arange(64.0).view(1, -1, 1, 1), torch.arange(4.0).view(2, 1, 2, 1)
        self.k = (slots + 100 * runs).expand(DRAFT.arena_shape).contiguous()
        self.v = -self.k
        self.drafts = DraftRows(DRAFT, self.k, self.v)
        target = torch.zeros(TARGET.arena_shape)
        self.packer = SegmentPacker(TARGET, target, target.clone(), drafts=self.drafts)

    def pay(self, run, tokens):
        """Attention that one run paid: {token: how much}."""
        for token, much in tokens.items():
            self.drafts.paid[run // 2, FIRST + token, run % 2] = much

    def pack(self, kept, order=None):
        """``kept``: tokens that each of the target's four heads keeps."""
        order = None if order is None else torch.tensor(order, dtype=torch.int16)
        self.segment, _ = pack(self.packer, SLOTS, START, selected(*kept), order=order)
        return Span(self.segment, START, START + TOKENS, is_owner=True)

    def read(self, span):
        """Tokens that each run of the draft reads."""
        runs = span.draft_runs()
        assert runs.num_tokens == span.num_tokens and runs is span.draft_runs()
        found = []
        for run in range(4):
            begin, length = int(runs.starts[run // 2, run % 2]), int(runs.lens[run // 2, run % 2])
            head_slots = runs.rows[begin : begin + length].long()
            rows = self.k.view(-1, 8)[head_slots]
            assert torch.equal(rows, -self.v.view(-1, 8)[head_slots]) and (rows == rows[:, :1]).all()
            tokens = (rows[:, 0] - 100 * run).int() - FIRST
            assert runs.positions[begin : begin + length].tolist() == (tokens + START).tolist()
            found.append(tokens.tolist())
        return found


@pytest.fixture
def world():
    made = World()
    made.pay(0, {token: 5.0 - token / 10 for token in range(6)} | {6: 0.2, 7: 0.1})
    made.pay(1, {4: 9.0, 9: 2.0})
    made.pay(3, {8: 7.0, 10: 1.5, 11: 1.0})
    return made


KEPT = [[0, 3, 5, 9], [0, 5, 9], [5, 9], [5]]
"""Ten entries in three slots: the draft has room for twelve rows, and thirteen were paid anything."""
READ = [[0, 1, 2, 3, 4, 5, 6], [4, 9], [], [8, 10, 11]]


def test_rows_that_were_paid_most_share_the_segments_slots(world):
    span = world.pack(KEPT)
    assert world.segment.num_slots == 3 and world.read(span) == READ


def test_of_rows_that_no_query_has_seen_the_latest_are_kept_in_all_heads_alike():
    world = World()
    world.pay(2, {3: 0.5})
    assert world.read(world.pack(KEPT)) == [[9, 10, 11], [9, 10, 11], [3, 9, 10, 11], [10, 11]]


def test_rows_stay_within_the_segments_slots(world):
    before = world.k.clone()
    world.pack(KEPT)
    others = torch.ones(64, dtype=torch.bool)
    others[world.segment.packed.token_slots] = False
    assert torch.equal(world.k[:, others], before[:, others])


@pytest.mark.parametrize("cut", range(1, TOKENS))
def test_both_halves_of_a_split_read_their_own_tokens(world, cut):
    upper, lower = world.pack(KEPT).split(START + cut)
    assert world.read(upper) == [[token for token in run if token < cut] for run in READ]
    assert world.read(lower) == [[token for token in run if token >= cut] for run in READ]


def test_a_resize_keeps_what_was_paid_most(world):
    span = world.pack(KEPT, order=range(10))
    assert resize(world.packer, world.segment, 1).numel() == 2
    assert world.read(span) == [[0, 1], [4], [], [8]]


def test_a_repack_forgets_dropped_tokens(world):
    """Twice: what is left of a shadow may have rows of dropped tokens, which nobody reads."""
    upper, lower = world.pack([[0, 5, 8], [0, 5, 9], [4, 9, 10], [5, 11]]).split(START + 7)
    lower.drop()
    repack(world.packer, upper.segment, upper.end)
    assert upper.segment.num_slots == 2 and world.read(upper) == [[0, 1, 2, 3, 4, 5, 6], [4], [], []]
    upper, lower = upper.split(START + 2)
    lower.drop()
    repack(world.packer, upper.segment, upper.end)
    assert upper.segment.num_slots == 1 and world.read(upper) == [[0, 1], [], [], []]


def elsewhere(num_tokens, order=None):
    """Entries of the first tokens, in every run, from outside the pool."""
    lens = torch.full((2, 2), num_tokens, dtype=torch.int32)
    positions = torch.arange(START, START + num_tokens, dtype=torch.int32).repeat(4)
    rows = torch.zeros(4 * num_tokens, TARGET.head_dim)
    return CopiedEntries(CopiedRows(lens, positions, rows, rows, order))


def test_segments_from_elsewhere_have_no_rows(world):
    copied = elsewhere(2, torch.arange(8, dtype=torch.int16))
    segment = world.packer.new_segment(torch.tensor([5, 9]), copied, START, START + TOKENS)
    span = Span(segment, START, START + TOKENS, is_owner=True)
    assert world.read(span) == [[]] * 4
    resize(world.packer, segment, 1)
    assert world.read(span) == [[]] * 4


def moved(world, views, slots):
    """A span of the views' tokens in other slots, as if it came from outside the pool."""
    copied = world.packer.copy_shadow([Source(TARGET, view) for view in views])
    world.k[:, :32], world.v[:, :32] = torch.nan, torch.nan  # the tokens' old slots
    start, end = views[0].start, views[-1].end
    segment = world.packer.new_segment(torch.tensor(slots), elsewhere(len(slots)), start, end, shadow=copied)
    used = world.k.isnan().any(0).any(-1).any(-1).nonzero().flatten().tolist()
    assert used == list(range(32))  # and nothing else was touched
    return Span(segment, start, end, is_owner=True)


def test_of_tokens_in_place_the_rows_come_back_that_were_paid_most(world):
    """As many as the slots of the kept entries hold: the same as if they had been packed before."""
    kept = kept_rows(selected(*KEPT), TOKENS)
    copied = world.packer.copy_shadow([Source(TARGET, TokenRange(SLOTS, START), kept)])
    world.pack(KEPT)
    packed = world.packer.copy_shadow([Source(TARGET, world.segment.live_view)])
    assert all(getattr(copied, name).equal(part) for name, part in vars(packed).items())


@pytest.mark.parametrize("cut", range(1, TOKENS + 1))
def test_rows_of_a_part_or_of_all_come_back_in_other_slots(world, cut):
    world.pack(KEPT)
    span = moved(world, [View(world.segment, START, START + cut)], [50, 40, 45])
    assert world.read(span) == [[token for token in run if token < cut] for run in READ]


def test_rows_of_two_segments_come_back_as_of_one(world):
    """The beginning of a segment that a path leaves after seven tokens, and one that goes on with five others."""
    world.pack(KEPT)
    rows = torch.arange(FIRST + 7.0, FIRST + TOKENS).view(1, 5, 1) + 100 * torch.arange(4.0).view(2, 1, 2)
    world.k[:, 50:55], world.v[:, 50:55] = rows[..., None], -rows[..., None]
    for run, token in enumerate((7, 9, 8, 11)):
        world.drafts.paid[run // 2, 43 + token, run % 2] = 0.5
    lower, _ = pack(world.packer, torch.arange(50, 55), START + 7, selected([0], [0], [0], [0]))
    upper = View(world.segment, START, START + 7)
    span = moved(world, [upper, View(lower, START + 7, START + TOKENS)], [40, 42, 44])
    assert world.read(span) == [[0, 1, 2, 3, 4, 5, 6, 7], [4, 9], [8], [11]]


def test_where_there_is_less_room_the_rows_that_were_paid_most_come_back(world):
    world.pack(KEPT)
    span = moved(world, [View(world.segment, START, START + TOKENS)], [50])
    assert world.read(span) == [[0, 1], [4], [], [8]]


def test_a_segment_without_rows_moves_without_rows(world):
    world.pack(KEPT)
    world.segment.packed = replace(world.segment.packed, shadow=world.drafts.absent())
    assert world.read(moved(world, [View(world.segment, START, START + TOKENS)], [50])) == [[]] * 4


def test_without_a_draft_model_there_is_no_shadow():
    arena = torch.zeros(TARGET.arena_shape)
    world = World()
    world.packer = SegmentPacker(TARGET, arena, arena.clone())
    span = world.pack(KEPT)
    assert world.packer.copy_shadow([Source(TARGET, world.segment.live_view)]) is None
    with pytest.raises(InvariantError, match="without one"):
        span.draft_runs()


def test_attention_of_a_prefill_is_recorded_by_slot():
    """The largest of all prefills; forgotten when the slot holds another token."""
    world = World()
    torch.manual_seed(0)
    world.k.copy_(torch.randn(DRAFT.arena_shape))
    want = torch.zeros(TOKENS, 2)
    for count in (3, 5):
        queries = torch.randn(count, 4, 8)
        keys = world.k[1, SLOTS].repeat_interleave(2, 1)
        hidden = torch.arange(TOKENS) > torch.arange(TOKENS - count, TOKENS)[:, None]
        scores = (torch.einsum("qhd,thd->qht", queries, keys) * 0.3).masked_fill(hidden[:, None], -torch.inf)
        lse, paid = scores.logsumexp(-1), scores.softmax(-1).square().sum(0)  # [heads, tokens]
        world.drafts.see(1, queries, lse, SLOTS, START, START + TOKENS - count, 0.3)
        want = torch.maximum(want, paid.view(2, 2, TOKENS).sum(1).T)
    torch.testing.assert_close(world.drafts.paid[1, SLOTS], want)
    assert world.drafts.paid[0].count_nonzero() == 0 and world.drafts.paid[1, FIRST - 1].count_nonzero() == 0
    world.drafts.forget(SLOTS[2:4].int())
    assert world.drafts.paid[1, SLOTS[2:4]].count_nonzero() == 0 and world.drafts.paid[1, SLOTS[4:]].all()


def test_a_repack_that_keeps_no_slot_keeps_no_row(world):
    upper, lower = world.pack([[9], [], [], []]).split(START + 7)
    assert world.read(upper) != [[]] * 4
    lower.drop()
    assert repack(world.packer, upper.segment, upper.end).numel() == 1 and world.read(upper) == [[]] * 4
