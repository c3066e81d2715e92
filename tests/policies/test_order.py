"""The order of a range's entries, whatever the policy; parts of an own policy that return something wrong are named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from helpers.decisions import built
from kvevict_kernels import radix_select
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.policies import LayerView, Policy, Scorer, Signal, TokenScores
from sgl_kvevict.policies.budgets import LayeredBudget, UniformHeads, UniformLayers
from sgl_kvevict.policies.order import LARGEST, PINNED, order_of
from sgl_kvevict.policies.parts import RangeScores
from sgl_kvevict.policies.selectors import TopKSelector
from sgl_kvevict.segments.segment import Packed, Rows, Segment, View
from sgl_kvevict.segments.sources import Source, TokenRange


def keys(values, kept, *, comparable=True, num_first=0, num_last=0):
    scores = RangeScores(torch.tensor(values), None, None, num_first, num_last)
    order = order_of(scores, torch.tensor(kept), comparable=comparable)
    assert order.dtype == torch.int16 and order.shape == torch.tensor(kept).shape
    return order.flatten().tolist()


ALL = [[[True] * 4], [[True] * 4]]
NONE = [[[False] * 4], [[False] * 4]]
VALUES = [[[-3.0, 0.5, 0.0, 7.0]], [[-0.25, 100.0, -80.0, 1e9]]]


def test_comparable_scores_keep_their_order_over_layers_and_heads():
    flat = [value for layer in VALUES for value in layer[0]]
    for kept in (ALL, NONE):
        found = keys(VALUES, kept)
        assert sorted(range(8), key=found.__getitem__) == sorted(range(8), key=flat.__getitem__)


def test_what_is_kept_comes_before_all_others():
    kept = [[[True, False, False, True]], [[False, False, True, False]]]
    for comparable in (True, False):
        found = keys(VALUES, kept, comparable=comparable)
        assert [key >= 0 for key in found] == [flag for layer in kept for flag in layer[0]]
        assert found[3] > found[0] and found[1] > found[2] and found[7] > found[5] > found[4]


def test_the_ends_of_both_halves_do_not_meet():
    """Infinite scores: more than any other, less than what is pinned, and on the side of what is kept."""
    values = [[[-torch.inf, torch.inf, -65504.0, 65504.0]], [[-torch.inf, torch.inf, -65504.0, 65504.0]]]
    found = keys(values, [ALL[0], NONE[1]])
    assert all(0 <= key < PINNED for key in found[:4]) and all(-(2**15) <= key < 0 for key in found[4:])
    assert found[1] >= found[3] > found[2] >= found[0] and found[5] >= found[7] > found[6] >= found[4]


def test_zeros_are_equal_whatever_their_sign():
    found = keys([[[0.0, -0.0, 1e-9, -1e-9]]], ALL[:1])
    assert len(set(found)) == 1


def test_other_scores_are_ranked_within_their_head():
    first, second = [[v[0] for v in VALUES][i] for i in (0, 1)]
    for kept in (ALL, NONE):
        found = keys(VALUES, kept, comparable=False)
        for values, part in ((first, found[:4]), (second, found[4:])):
            assert sorted(range(4), key=part.__getitem__) == sorted(range(4), key=values.__getitem__)
        assert sorted(found[:4]) == sorted(found[4:])


def test_ranks_are_exact_in_long_ranges():
    """Positions of 20,000 tokens differ, which float16 cannot say."""
    values = torch.arange(20_000.0).view(1, 1, -1)
    kept = values > 15_000
    order = order_of(RangeScores(values, None, None, 0, 0), kept, comparable=False).flatten()
    assert order.diff().gt(0).all() and order.ge(0).equal(kept.flatten())


def test_heads_that_keep_more_give_up_more():
    """A head's ranks are shares of what it keeps: half of it goes at the same key."""
    kept = [[[True] * 4, [True, True, False, False]]]
    found = keys([[[1.0, 2.0, 3.0, 4.0], [4.0, 3.0, 2.0, 1.0]]], kept, comparable=False)
    assert found[3] == found[4] and found[1] == found[5]


def test_what_is_kept_without_competing_comes_first():
    for comparable in (True, False):
        found = keys(VALUES, ALL, comparable=comparable, num_first=1, num_last=1)
        assert [found[i] for i in (0, 3, 4, 7)] == [PINNED, PINNED - 1] * 2
        assert max(*found[1:3], *found[5:7]) <= LARGEST


def test_last_tokens_come_before_everything_that_competes_the_later_the_sooner():
    """Infinite scores compete, too. Where even last tokens have to go, all heads lose the same ones."""
    values = torch.full((1, 2, 400), torch.inf)
    for comparable in (True, False):
        scores = RangeScores(values, None, None, 2, 300)
        order = order_of(scores, torch.ones(1, 2, 400, dtype=torch.bool), comparable=comparable)
        assert order[..., :2].eq(PINNED).all() and 0 <= order[..., 2:100].min() <= order[..., 2:100].max() <= LARGEST
        last = order[0, :, 100:]
        assert last[0].equal(last[1]) and last.min() > LARGEST and last.max() < PINNED
        assert last[0, -256:].diff().eq(1).all() and last[0, :45].eq(LARGEST + 1).all()


def test_layers_that_share_a_choice_share_its_order():
    found = keys(VALUES[:1], [*ALL, *ALL][:3])
    assert found[:4] == found[4:8] == found[8:]


@pytest.mark.parametrize(
    ("windows", "bits", "num_sinks", "size", "smaller"),
    [((), 16, 0, 160, 80), ((0, 8, 0, 8), 16, 0, 160, 80), ((), "auto", 2, 576, 256)],
)
@pytest.mark.parametrize("name", ["random", "h2o", "streaming-llm"])
def test_order_and_choice_read_nothing_from_a_device(monkeypatch, name, windows, bits, num_sinks, size, smaller):
    """With tensors that have no content: any number that the host wanted to know would be an error."""
    monkeypatch.setattr(radix_select, "top_mask", lambda keys, counts: torch.empty_like(keys, dtype=torch.bool))
    monkeypatch.setattr(radix_select, "kth_largest", lambda keys, counts: keys[:, 0])
    geometry = KVGeometry(4, 4, 2, 16, 101, windows=windows)
    policy = built(name)
    with FakeTensorMode():
        slots = torch.empty(100, dtype=torch.int64, device="meta")
        rows, attention = torch.empty(101, 2, 16, device="meta"), torch.empty(2, 100, device="meta")
        signals = {Signal.ACCUMULATED_ATTENTION: attention}
        order = policy.order(lambda layer: LayerView(layer, 0, rows, rows, slots, 0.3, signals), geometry, 160, 2).keys
        assert order.shape == (4, 2, 100)
        chosen = Source(geometry, TokenRange(slots, 0, order, num_sinks)).best(20, bits)
        width = 16 if bits == 16 else 4
        assert (chosen.kept.bits, chosen.kept.num_entries) == (width, size)
        kept = chosen.entries
        assert kept.positions.shape == (size,) and kept.keys is not None
        indptr = torch.empty(9, dtype=torch.int32, device="meta")
        packed = Packed(slots[:20], Rows(width, kept.rows, kept.positions, indptr, kept.keys), num_sinks)
        chosen = Source(geometry, View(Segment(geometry, 0, 100, packed), 0, 100)).best(10, bits)
        assert (chosen.kept.bits, chosen.kept.num_entries) == (width, smaller)
        assert chosen.entries.positions.shape == (smaller,)


GEOMETRY = KVGeometry(num_layers=3, num_qo_heads=2, num_kv_heads=2, head_dim=4, num_token_slots=41)


@dataclass(frozen=True)
class Scores(Scorer):
    """Scores of layer 1 are what ``make`` makes of sound ones."""

    make: Callable[[torch.Tensor], TokenScores]

    def score(self, view: LayerView) -> TokenScores:
        sound = torch.arange(80.0).view(2, 40)
        return self.make(sound) if view.layer == 1 else TokenScores(sound, sound, sound[0])


class ShortBudget(LayeredBudget):
    def allocate(self, scores: RangeScores, total: int) -> torch.Tensor:
        return super().allocate(scores, total)[:, :1]


class Numbers(TopKSelector):
    def select(self, scores: RangeScores, keep_lens: torch.Tensor) -> torch.Tensor:
        return super().select(scores, keep_lens).float()


def order(scorer: Scorer, allocator: type = LayeredBudget, selector: type = TopKSelector) -> None:
    policy = Policy("mine", scorer, allocator(UniformLayers(), UniformHeads()), selector())
    rows, slots = torch.zeros(41, 2, 4), torch.arange(40)
    policy.order(lambda layer: LayerView(layer, 0, rows, rows, slots, 0.5), GEOMETRY, 60, 2).check()


def sound(scores: torch.Tensor) -> TokenScores:
    return TokenScores(scores, scores, scores[0])


SHAPES = {
    "one token short": (lambda x: TokenScores(x[:, 1:], x, x[0]), r"values of Scores, layer 1: .*\(2, 39\).*\(2, 40\)"),
    "one head short": (lambda x: TokenScores(x[:1], x, x[0]), r"values of Scores, layer 1: .*\(1, 40\).*\(2, 40\)"),
    "flat": (lambda x: TokenScores(x.flatten(), x, x[0]), r"values of Scores, layer 1: .*\(80,\).*\(2, 40\)"),
    "float16": (lambda x: TokenScores(x.half(), x, x[0]), r"values of Scores, layer 1: .*float16; allowed: .*float32"),
    "tie_break": (lambda x: TokenScores(x, x[:, 1:], x[0]), r"tie_break of Scores, layer 1: .*\(2, 39\).*\(2, 40\)"),
    "importance": (lambda x: TokenScores(x, x, x[0, 1:]), r"importance of Scores, layer 1: .*\(39,\).*\(40,\)"),
}


@pytest.mark.parametrize("kind", SHAPES)
def test_scores_of_another_shape_or_dtype(kind: str) -> None:
    make, message = SHAPES[kind]
    with pytest.raises(ValueError, match=f"^policy 'mine': {message}"):
        order(Scores(make))


@pytest.mark.parametrize("which", ["values", "tie_break", "importance"])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_scores_that_are_no_finite_numbers(which: str, wrong: float) -> None:
    def make(scores: torch.Tensor) -> TokenScores:
        fields = {"values": scores.clone(), "tie_break": scores.clone(), "importance": scores[0].clone()}
        fields[which][..., 7:10] = wrong
        return TokenScores(**fields)

    count = 3 if which == "importance" else 6
    with pytest.raises(
        ValueError, match=rf"^policy 'mine': {count} scores of a range of \(3, 2, 40\) .* finite numbers"
    ):
        order(Scores(make))


def test_budgets_and_choices_of_another_shape_or_dtype() -> None:
    with pytest.raises(ValueError, match=r"budgets of ShortBudget: .*\(3, 1\).*allowed: \(3, 2\)"):
        order(Scores(sound), ShortBudget)
    with pytest.raises(ValueError, match=r"choice of Numbers: .*float32; allowed: .*bool"):
        order(Scores(sound), selector=Numbers)
