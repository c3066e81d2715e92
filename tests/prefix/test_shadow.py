"""Rows of a draft model lie in the slots of compressed tokens, follow their segment, and belong to the right tokens."""

from __future__ import annotations

import pytest
import torch

from sgl_kvevict.errors import InvariantError
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.prefix import DraftRows, SegmentPacker, Span
from sgl_kvevict.ragged import Selection

TARGET = KVGeometry(num_layers=2, num_qo_heads=2, num_kv_heads=2, head_dim=4, num_token_slots=64)
DRAFT = KVGeometry(num_layers=3, num_qo_heads=2, num_kv_heads=1, head_dim=8, num_token_slots=64)
START, TOKENS = 100, 12


def draft_arena():
    """Every row names its slot and layer."""
    slots, layers = torch.arange(64.0).view(1, -1, 1, 1), torch.arange(3.0).view(-1, 1, 1, 1)
    return (slots + 1000 * layers).expand(DRAFT.arena_shape).contiguous()


@pytest.fixture
def world():
    k = draft_arena()
    target = torch.zeros(TARGET.arena_shape)
    drafts = DraftRows(DRAFT, k, v := -k)
    return SegmentPacker(TARGET, target, target.clone(), drafts=drafts), k, v


def pack(store, kept, slots, worth=None):
    """Pack tokens, kept by each of the four heads of the target."""
    lens = torch.tensor([len(tokens) for tokens in kept], dtype=torch.int32).view(2, 2)
    indices = torch.tensor([token for tokens in kept for token in tokens], dtype=torch.int32)
    worth = None if worth is None else torch.tensor(worth, dtype=torch.int16)
    segment, freed = store.pack(slots, START, Selection(lens, indices, len(indices)), worth=worth)
    return segment, freed, Span(segment, START, START + TOKENS, is_owner=True)


def read(world, span):
    """Positions of the tokens that the draft reads, and the slots where their rows were written, in every layer."""
    _, k, v = world
    runs = span.draft_runs()
    assert runs.num_tokens == span.num_tokens and runs is span.draft_runs()
    found = []
    for layer in range(3):
        begin, length = int(runs.starts[layer, 0]), int(runs.lens[layer, 0])
        head_slots = runs.head_slots[begin : begin + length].long()
        rows = k.view(-1, 8)[head_slots]
        assert torch.equal(rows, -v.view(-1, 8)[head_slots]) and (rows == rows[:, :1]).all()
        found.append((rows[:, 0] - 1000 * layer).int().tolist())
    assert found[0] == found[1] == found[2]
    return found[0]


KEPT = [[0, 3, 5, 9], [0, 5, 9], [3, 5, 9], [5, 8]]
"""12 entries in three slots: most heads keep 5 (four), 9 (three), 0 and 3 (two)."""


def test_the_draft_keeps_the_rows_before_the_tokens_that_most_heads_keep(world):
    """A draft's row knows the token after its own. Of equal tokens the first ones; token 0 has no row before it."""
    slots = torch.randperm(63)[:TOKENS] + 1
    segment, _, span = pack(world[0], KEPT, slots)
    assert segment.num_slots == 3
    assert segment.shadow.positions.tolist() == [START + 2, START + 4, START + 8]
    assert read(world, span) == [int(slots[i]) for i in (2, 4, 8)]


def test_rows_stay_within_the_segments_slots(world):
    _, k, _ = world
    before = k.clone()
    segment, freed, _ = pack(world[0], KEPT, torch.arange(20, 20 + TOKENS))
    others = torch.ones(64, dtype=torch.bool)
    others[segment.token_slots] = False
    assert torch.equal(k[:, others], before[:, others]) and set(freed.tolist()).isdisjoint(segment.token_slots.tolist())


@pytest.mark.parametrize("cut", range(START + 1, START + TOKENS))
def test_both_halves_of_a_split_read_their_own_tokens(world, cut):
    slots = torch.arange(20, 20 + TOKENS)
    _, _, span = pack(world[0], KEPT, slots)
    upper, lower = span.split(cut)
    assert read(world, upper) == [20 + i for i in (2, 4, 8) if START + i < cut]
    assert read(world, lower) == [20 + i for i in (2, 4, 8) if START + i >= cut]


def test_a_squeeze_keeps_the_rows_of_what_is_left(world):
    worth = [1, 9, 9, 1, 1, 9, 1, 9, 9, 1, 9, 9]  # 3: twice, 5: four times, 8: once, of seven entries above 1
    segment, _, span = pack(world[0], KEPT, torch.arange(20, 20 + TOKENS), worth)
    freed = world[0].squeeze([span], 2)
    assert freed.numel() == 1 and span.segment is not segment
    assert read(world, span) == [22, 24]


@pytest.mark.parametrize(
    ("kept", "before", "num_slots", "after"),
    [
        ([[1, 9], [9, 10], [9, 10], [1, 9, 10]], [20, 28, 29], 1, [20]),
        ([[1, 4, 9, 10, 11], [2, 9, 10, 11], [3, 9, 10, 11], [5, 9, 10, 11]], [20, 28, 29, 30, 31], 2, [20]),
    ],
    ids=["full", "a slot is empty"],
)
def test_a_repack_forgets_the_dropped_tokens(world, kept, before, num_slots, after):
    """The slots that are left may have no row of a token that is left."""
    _, _, span = pack(world[0], kept, torch.arange(20, 20 + TOKENS))
    assert read(world, span) == before
    upper, lower = span.split(START + 6)
    assert lower.drop() is None
    world[0].repack([upper])
    assert upper.segment.num_slots == num_slots and read(world, upper) == after
    first, rest = upper.split(START + 2)
    assert rest.drop() is None
    world[0].repack([first])
    assert read(world, first) == after


def test_segments_from_elsewhere_have_no_rows(world):
    store, _, _ = world
    lens = torch.full((2, 2), 2, dtype=torch.int32)
    positions = torch.tensor([100, 101] * 4, dtype=torch.int32)
    segment = store.new_segment(torch.tensor([5, 9]), lens, positions, START, START + TOKENS)
    assert read(world, Span(segment, START, START + TOKENS, is_owner=True)) == []


def test_without_a_draft_model_there_is_no_shadow():
    arena = torch.zeros(TARGET.arena_shape)
    segment, _, span = pack(SegmentPacker(TARGET, arena, arena.clone()), KEPT, torch.arange(20, 20 + TOKENS))
    assert segment.shadow is None
    with pytest.raises(InvariantError, match="without one"):
        span.draft_runs()
