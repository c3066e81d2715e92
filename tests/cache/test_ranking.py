"""Entries of a range are ranked beside the next step; its nodes, rows and slots change hands after it."""

from __future__ import annotations

import pytest
import torch

from helpers.fake_tree import CONFIG, FakeNode, FakePasses, FakeReader, FakeTree
from helpers.late_stream import LateStream
from helpers.pseudo_random_policy import PseudoRandomPolicy
from sgl_kvevict.cache.readers import Released
from sgl_kvevict.cache.resize import TURNS_OF_RANKING
from sgl_kvevict.guard import Place


class Cache:
    """A tree whose entries are chosen on a stream that runs as late as it may."""

    def __init__(self, *, splittable: bool = True, **fields) -> None:
        self.stream = LateStream()
        policy = PseudoRandomPolicy(splittable=splittable)
        self.tree = FakeTree(policy, CONFIG.model_copy(update=fields), stream=self.stream)
        self.resizer = self.tree.prefixes.resizer
        self._live: list[FakeReader] = []

    def prompt(self, node: FakeNode) -> FakeReader:
        """A request that lives on."""
        self._live.append(self.tree.prompt(node))
        return self._live[-1]

    @property
    def spans(self) -> list[tuple[int, int]]:
        return sorted((span.start, span.end) for span in self.tree.prefixes.spans.values())

    @property
    def stages(self) -> list[str]:
        """Of the ranges that are to shrink, oldest first."""
        orders = [segment.order for segment in self.tree.prefixes.table.wanted]
        return ["waits" if order is None or order.turn is None else "is ranked" for order in orders]

    def turns(self, count: int = TURNS_OF_RANKING) -> None:
        for _ in range(count):
            self.resizer.between_steps()


def test_a_prompt_is_exchanged_two_turns_after_its_choice_was_launched():
    cache = Cache()
    node = cache.tree.add(20)
    reader, other = cache.prompt(node), cache.tree.reader(node)
    for _ in range(TURNS_OF_RANKING):
        assert cache.spans == [] and cache.stages == ["is ranked"] and len(cache.stream.waiting) == 1
        assert reader.row[:20].ne(0).all() and not cache.tree.free_slots
        cache.turns(1)
    assert cache.spans == [(0, 18)] and not cache.stages and not cache.stream.waiting
    assert all(each.row[:18].eq(0).all() and each.row[18:20].ne(0).all() for each in (reader, other))
    assert node.parent.charged == 9 and len(cache.tree.free_slots) == 9


def test_the_same_entries_are_kept_as_where_nothing_runs_beside():
    cache, other = Cache(), FakeTree(PseudoRandomPolicy())
    cache.prompt(node := cache.tree.add(20))
    cache.turns()
    reader = other.prompt(same := other.add(20))
    one, two = (
        tree.prefixes.spans[end.parent].segment.storage.parts[0] for tree, end in ((cache.tree, node), (other, same))
    )
    assert torch.equal(one.positions, two.positions) and torch.equal(one.rows, two.rows)
    assert cache.tree.free_slots == other.free_slots and reader.row[:18].eq(0).all()


def test_segments_that_cannot_be_split_are_chosen_one_by_one():
    cache = Cache(splittable=False)
    second = cache.tree.add(6, cache.tree.add(5))
    cache.tree.add(3, second)
    cache.prompt(cache.tree.add(10, second))
    assert cache.stream.num_launched == 2
    cache.turns()
    assert cache.spans == [(0, 5), (5, 11), (11, 19)]
    assert len({span.segment for span in cache.tree.prefixes.spans.values()}) == 2


def test_where_slots_are_short_the_exchange_does_not_wait_for_its_turn():
    cache = Cache()
    cache.prompt(cache.tree.add(20))
    assert cache.tree.prefixes.pressure.reclaim(None) == 9
    assert cache.spans == [(0, 18)] and not cache.stages


@pytest.mark.parametrize("why", Released)
def test_a_reader_that_ends_changes_nothing(why):
    cache = Cache()
    cache.tree.release(cache.prompt(cache.tree.add(20)), why)
    cache.turns()
    assert cache.spans == [(0, 18)]


def test_a_dropped_range_is_forgotten():
    cache = Cache()
    node = cache.tree.add(20)
    cache.tree.release(cache.prompt(node))
    end = node.parent
    cache.tree.drop(node)
    cache.tree.drop(end)
    cache.turns(3)
    assert not cache.stages and not cache.spans and sorted(cache.tree.free_slots) == list(range(1, 21))
    assert len(cache.stream.waiting) == 1
    cache.stream.catch_up()


@pytest.mark.parametrize("forget", ["keep_only_spans", "cleared"])
def test_nothing_is_exchanged_after_a_flush_or_with_other_weights(forget):
    cache = Cache()
    cache.prompt(cache.tree.add(20))
    getattr(cache.tree.prefixes, forget)()
    cache.turns(3)
    assert not cache.stages and not cache.spans


def test_a_split_range_is_exchanged_whole():
    cache = Cache()
    cache.prompt(node := cache.tree.add(20))
    cache.tree.cut([node.parent], 7)
    cache.turns()
    assert cache.spans == [(0, 7), (7, 18)]
    assert len({span.segment for span in cache.tree.prefixes.spans.values()}) == 1


def test_an_exact_reader_that_comes_meanwhile_is_waited_for():
    cache = Cache()
    node = cache.tree.add(20)
    cache.prompt(node)
    exact = cache.tree.reader(node)
    cache.tree.prefixes.readers[exact].is_exact = True
    cache.turns()
    assert not cache.spans and len(cache.stages) == 1 and exact.row[:20].ne(0).all()
    cache.turns(3)
    assert not cache.spans and len(cache.stages) == 1
    cache.tree.release(exact)
    assert cache.spans == [(0, 18)] and not cache.stages and cache.stream.num_launched == 1


def test_the_same_prompt_is_not_chosen_twice():
    """Else a prompt that is sent in every step would never be compressed."""
    cache = Cache()
    node = cache.tree.add(20)
    cache.prompt(node)
    cache.turns(1)
    again = cache.tree.reader(node)
    cache.tree.observe(again, cache.tree.root, 0, 20)
    cache.tree.complete(again, node)
    assert cache.stream.num_launched == 1
    cache.turns(1)
    assert cache.spans == [(0, 18)]


def test_prompts_that_begin_alike_are_compressed_one_after_the_other():
    cache = Cache()
    shared = cache.tree.add(10)
    for _ in range(2):
        cache.prompt(cache.tree.add(10, shared))
    assert cache.stages == ["is ranked", "waits"]
    cache.turns()
    assert cache.spans == [(0, 10), (10, 18)] and cache.stages == ["is ranked"]
    cache.turns()
    assert cache.spans == [(0, 10), (10, 18), (10, 18)] and not cache.stages


def test_a_range_whose_beginning_was_compressed_elsewhere_is_chosen_anew():
    cache = Cache()
    upper = cache.tree.add(8)
    cache.prompt(cache.tree.add(12, upper))
    cache.resizer.shrink_now(cache.resizer.range_to([upper], 8), 1.0)
    cache.turns()
    assert cache.spans == [(0, 8)] and cache.stages == ["is ranked"] and cache.stream.num_launched == 2
    cache.turns()
    assert cache.spans == [(0, 8), (8, 18)]


def test_too_little_left_is_forgotten():
    cache = Cache()
    upper = cache.tree.add(16)
    cache.prompt(cache.tree.add(4, upper))
    cache.resizer.shrink_now(cache.resizer.range_to([upper], 16), 1.0)
    cache.turns()
    assert cache.spans == [(0, 16)] and not cache.stages


def test_a_new_branch_inside_what_cannot_be_split_is_chosen_anew():
    cache = Cache(splittable=False)
    upper = cache.tree.add(8)
    cache.prompt(cache.tree.add(12, upper))
    cache.tree.add(3, upper)
    cache.turns()
    assert not cache.spans and cache.stream.num_launched == 3
    cache.turns()
    assert cache.spans == [(0, 8), (8, 18)]
    assert len({span.segment for span in cache.tree.prefixes.spans.values()}) == 2


@pytest.mark.parametrize("is_late", [False, True])
def test_a_policy_that_fails_leaves_the_range_as_it_is(monkeypatch, is_late):
    """At its launch, or when its result is asked for."""
    cache = Cache()
    broken = "_order" if is_late else "rank"
    monkeypatch.setattr(type(cache.tree.prefixes.compressor), broken, lambda *_: 1 / 0)
    cache.prompt(cache.tree.add(20))
    assert cache.tree.guard.errors[Place.COMPRESSION] == (0 if is_late else 1)
    cache.turns()
    assert cache.tree.guard.errors[Place.COMPRESSION] == 1 and not cache.spans and not cache.stages


def test_what_passes_have_read_is_exchanged_in_turn():
    stream = LateStream()
    tree = FakeTree(PseudoRandomPolicy(needs_passes=True), stream=stream)
    passes, node = FakePasses(tree), tree.add(24)
    tree.release(tree.prompt(node))
    tree.release(tree.prompt(tree.add(4, node), found=node))
    while passes.run():
        pass
    for _ in range(TURNS_OF_RANKING):
        tree.prefixes.resizer.between_steps()
    assert [(span.start, span.end) for span in tree.prefixes.spans.values()] == [(0, 22)]
