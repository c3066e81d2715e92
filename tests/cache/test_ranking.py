"""Entries of a range are ranked beside the next step; its nodes, rows and slots change hands after it."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
import torch

from helpers.documents import admitted, document, make_harness, ranges, reading, reclaim
from helpers.late_stream import LateStream
from sgl_kvevict.cache.resize import TURNS_OF_RANKING
from sgl_kvevict.guard import Place
from sgl_kvevict.policies import LayerView, Policy, Scorer, TokenScores
from sgl_kvevict.policies.budgets import LayeredBudget, UniformHeads, UniformLayers
from sgl_kvevict.policies.selectors import TopKSelector

DOCUMENT = document(0, 18)


class Cache:
    """A tree whose entries are ranked on a stream that runs as late as it may."""

    def __init__(self, **fields) -> None:
        self.stream = LateStream()
        self.harness = make_harness(options={"make_stream": lambda: self.stream}, **fields)
        self.table, self.resizer = self.harness.tree.prefixes.table, self.harness.tree.prefixes.resizer

    @property
    def stages(self) -> list[str]:
        """Of the ranges that are to shrink, oldest first."""
        return ["is ranked" if opened.is_launched else "waits" for opened in self.table.open.values()]

    def turns(self, count: int = TURNS_OF_RANKING) -> None:
        for _ in range(count):
            self.harness.turn()

    def compress_beginning(self, num_tokens: int) -> None:
        """The first tokens of the range that waits are compressed for another reason: they came from a file, say."""
        (last,) = self.table.open
        self.resizer._is_early_at = lambda first: False
        self.resizer.compress(last, num_tokens, share=1.0)
        del self.resizer._is_early_at
        self.harness.check()


@pytest.fixture
def cache() -> Cache:
    return Cache()


def test_a_prompt_is_exchanged_two_turns_after_its_choice_was_launched(cache):
    reader, free = cache.harness.run(DOCUMENT), cache.harness.allocator.available_size()
    for _ in range(TURNS_OF_RANKING):
        assert ranges(cache.harness) == [] and cache.stages == ["is ranked"] and len(cache.stream.waiting) == 1
        assert cache.harness.allocator.available_size() == free
        cache.turns(1)
    assert ranges(cache.harness) == [(0, 18)] and not cache.stages and not cache.stream.waiting
    assert cache.harness.allocator.available_size() == free + 9
    cache.harness.decode(reader)


def test_the_same_entries_are_kept_as_where_nothing_runs_beside():
    cache, other = Cache(), make_harness()
    cache.harness.run(DOCUMENT)
    cache.turns()
    other.run(DOCUMENT)
    one, two = (next(iter(each.tree.spans.values())).segment.packed.rows for each in (cache.harness, other))
    assert torch.equal(one.positions, two.positions) and torch.equal(one.rows, two.rows)


def test_segments_that_cannot_be_split_are_chosen_one_by_one():
    cache = Cache(splittable=False, min_prefix_tokens=16)
    cache.harness.finish(cache.harness.run([*DOCUMENT[:11], 50]))
    cache.harness.run(document(0, 20))  # its last two tokens stay as they are
    assert cache.stream.num_launched == 2
    cache.turns()
    assert ranges(cache.harness) == [(0, 11), (11, 18)]
    assert len({span.segment for span in cache.harness.tree.spans.values()}) == 2


def test_where_slots_are_short_the_exchange_does_not_wait_for_its_turn(cache):
    cache.harness.run(DOCUMENT)
    assert reclaim(cache.harness) >= 9
    assert ranges(cache.harness) == [(0, 18)] and not cache.stages


@pytest.mark.parametrize("end", ["finish", "retract", "abort"])
def test_a_reader_that_ends_changes_nothing(cache, end):
    getattr(cache.harness, end)(cache.harness.run(DOCUMENT))
    cache.turns()
    assert ranges(cache.harness) == [(0, 18)]


def test_a_dropped_range_is_forgotten(cache, monkeypatch):
    monkeypatch.setattr(cache.harness.tree.prefixes.pressure, "reclaim", lambda *_: 0)  # it would shrink instead
    cache.harness.finish(cache.harness.run(DOCUMENT))
    for _ in range(2):
        cache.harness.evict(1)
    cache.turns(3)
    assert not cache.stages and not ranges(cache.harness)
    assert cache.harness.allocator.available_size() == cache.harness.num_slots
    assert len(cache.stream.waiting) == 1
    cache.stream.catch_up()


@pytest.mark.parametrize("forget", ["forget_compressed", "reset"])
def test_nothing_is_exchanged_after_a_flush_or_with_other_weights(cache, forget):
    cache.harness.finish(cache.harness.run(DOCUMENT))
    if forget == "reset":
        cache.harness.flush()
    else:
        cache.harness.tree.forget_compressed()
    cache.turns(3)
    assert not cache.stages and not ranges(cache.harness)


def test_a_split_range_is_exchanged_whole(cache):
    cache.harness.run(DOCUMENT)
    admitted(cache.harness, [*DOCUMENT[:7], 50])
    cache.turns()
    assert ranges(cache.harness) == [(0, 7), (7, 18)]
    assert len({span.segment for span in cache.harness.tree.spans.values()}) == 1


def test_an_exact_reader_that_comes_meanwhile_is_waited_for(cache):
    cache.harness.run(DOCUMENT)
    exact = reading(cache.harness, DOCUMENT)
    for count in (TURNS_OF_RANKING, 3):
        cache.turns(count)
        assert not ranges(cache.harness) and len(cache.stages) == 1
    cache.harness.decode(exact)
    cache.harness.finish(exact)
    # the second request found all but the last token, so the node was cut before it
    assert ranges(cache.harness) == [(0, 17), (17, 18)] and not cache.stages and cache.stream.num_launched == 1


def test_the_same_prompt_is_not_chosen_twice(cache):
    """Else a prompt that is sent in every step would never be compressed."""
    cache.harness.run(DOCUMENT)
    cache.turns(1)
    cache.harness.run(DOCUMENT)
    assert cache.stream.num_launched == 1
    cache.turns(1)
    assert ranges(cache.harness) == [(0, 17), (17, 18)]  # all but the last token were found


def test_prompts_that_begin_alike_are_compressed_one_after_the_other(cache):
    for number in (1, 2):
        cache.harness.run([*DOCUMENT[:10], *document(number, 8)])
    assert cache.stages == ["is ranked", "waits"]
    cache.turns()
    assert ranges(cache.harness) == [(0, 10), (10, 18)] and cache.stages == ["is ranked"]
    cache.turns()
    assert ranges(cache.harness) == [(0, 10), (10, 18), (10, 18)] and not cache.stages


def test_a_range_whose_beginning_was_compressed_elsewhere_is_chosen_anew(cache):
    cache.harness.run(DOCUMENT)
    cache.compress_beginning(8)
    cache.turns()
    assert ranges(cache.harness) == [(0, 8)] and cache.stages == ["is ranked"] and cache.stream.num_launched == 2
    cache.turns()
    assert ranges(cache.harness) == [(0, 8), (8, 18)]


def test_too_little_left_is_forgotten(cache):
    cache.harness.run(DOCUMENT)
    cache.compress_beginning(16)
    cache.turns()
    assert ranges(cache.harness) == [(0, 16)] and not cache.stages


def test_a_new_branch_inside_what_cannot_be_split_is_chosen_anew():
    cache = Cache(splittable=False)
    cache.harness.finish(cache.harness.run(DOCUMENT[:5]))
    cache.harness.run(document(0, 20))
    launched = cache.stream.num_launched
    cache.harness.finish(cache.harness.run([*DOCUMENT[:5], 50]))
    cache.turns(3 * TURNS_OF_RANKING)
    assert cache.stream.num_launched >= launched and not cache.stages
    assert {end for _, end in ranges(cache.harness)} >= {5, 18}


@pytest.mark.parametrize("is_late", [False, True])
def test_a_policy_that_fails_leaves_the_range_as_it_is(cache, monkeypatch, is_late):
    """At its launch, or when its result is asked for."""
    broken = "_order" if is_late else "rank"
    monkeypatch.setattr(type(cache.harness.tree.compressor), broken, lambda *_: 1 / 0)
    reader, errors = cache.harness.run(DOCUMENT), cache.harness.tree.guard.errors
    assert errors[Place.COMPRESSION] == (0 if is_late else 1)
    cache.turns()
    assert errors[Place.COMPRESSION] == 1 and not ranges(cache.harness) and not cache.stages
    cache.harness.decode(reader)


@pytest.mark.parametrize(("num_ranked", "wanted"), [(0, [8, 8]), (1, [8, 10])])
def test_a_policy_that_fails_for_one_of_several_segments_leaves_the_rest_as_it_is(monkeypatch, num_ranked, wanted):
    """What cannot be split ends where prompts branch off, and each part is ranked by itself."""
    harness = make_harness(splittable=False)
    compressor, lengths = harness.tree.compressor, []
    rank = compressor.rank

    def rank_some(slots, *args):
        lengths.append(slots.numel())
        if len(lengths) > num_ranked:
            raise RuntimeError("no memory")
        return rank(slots, *args)

    monkeypatch.setattr(compressor, "rank", rank_some)
    exact = reading(harness, [*DOCUMENT[:8], 50, 51])
    reader = harness.run(document(0, 20))
    assert not lengths
    harness.finish(exact)
    assert lengths == wanted and ranges(harness) == [(0, 8)][:num_ranked]
    assert harness.tree.guard.errors[Place.COMPRESSION] == 2 - num_ranked and not harness.tree.prefixes.table.open
    harness.decode(reader)
    harness.finish(reader)


@dataclass(frozen=True)
class WrongScores(Scorer):
    """Scores that cannot be compared."""

    number: float

    def score(self, view: LayerView) -> TokenScores:
        return TokenScores(torch.full((view.num_kv_heads, view.num_tokens), self.number))


def wrong_policy(number: float) -> Policy:
    return Policy("mine", WrongScores(number), LayeredBudget(UniformLayers(), UniformHeads()), TopKSelector())


@pytest.mark.parametrize("is_beside", [False, True])
@pytest.mark.parametrize("number", [float("nan"), float("-inf")])
def test_by_scores_that_are_no_numbers_nothing_is_compressed(caplog, number, is_beside):
    """The range stays uncompressed, where slots are short, too; the error is counted, and names policy and shape."""
    make_stream = LateStream if is_beside else None
    harness = make_harness(options={"policy": wrong_policy(number), "make_stream": make_stream})
    reader = harness.run(DOCUMENT)
    for _ in range(TURNS_OF_RANKING):
        harness.turn()
    reclaim(harness)
    assert harness.tree.guard.errors[Place.COMPRESSION] == 1 and not ranges(harness)
    assert re.search(r"policy 'mine': \d+ scores of a range of \(\d+, \d+, 18\)", caplog.text)
    harness.decode(reader)
    harness.finish(reader)


def test_a_range_whose_end_is_dropped_before_its_wrong_order_is_read():
    """The drop is accounting, which an error would end the server in: the order is checked where it is used."""
    harness = make_harness(options={"policy": wrong_policy(float("nan")), "make_stream": LateStream})
    harness.finish(harness.run(DOCUMENT))
    harness.finish(harness.run([*DOCUMENT[:10], 50]))
    harness.tree.prefixes.pressure.reclaim = lambda *_: 0  # it would be read instead
    for _ in range(3):
        harness.evict(1)
    harness.turn()
    assert not ranges(harness)
