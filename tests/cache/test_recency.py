"""Which leaf goes first: what saves little, and what was left alone."""

from __future__ import annotations

import random
import time
from types import SimpleNamespace

import pytest
from sglang.srt.mem_cache.evict_policy import LRUStrategy

from helpers.harness import Harness
from sgl_kvevict.cache import recency as recency_module
from sgl_kvevict.cache.recency import CostAwareRecency


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Every reading is later than the one before: what happens at once has an order."""
    ticks = iter(range(10**9))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(ticks)))


def document(number: int) -> list[int]:
    return [number * 100 + i for i in range(40)]


def ask(harness, number, *question):
    harness.finish(harness.run([*document(number), *question]))


def droppable(harness) -> set:
    """Leaves that nobody reads."""
    return harness.tree.tree_core.evictable_device_leaves


def held(harness) -> set[int]:
    """Documents whose compressed prefix is in the cache."""
    return {node.key.token_ids[0] // 100 for node in harness.tree.spans}


@pytest.fixture
def harness():
    """Three documents, compressed to 0.3, each with a question below it."""
    harness = Harness(num_slots=400)
    for number in range(3):
        ask(harness, number)
        ask(harness, number, 1, 2, 3, 4, 5)
    assert held(harness) == {0, 1, 2}
    return harness


def test_questions_go_before_the_compressed_prefixes_they_hang_off(harness):
    leaves = len(droppable(harness))
    assert leaves == 3
    for _ in range(leaves):
        harness.evict(1)
    assert held(harness) == {0, 1, 2} and all(node in harness.tree.spans for node in droppable(harness))
    harness.check()


def test_a_prefix_that_is_left_alone_goes_in_the_end(harness):
    rounds = 0
    while 2 in held(harness):
        rounds += 1
        assert rounds < 20
        for number in (0, 1):
            ask(harness, number, 50 + rounds, 7, 8, 9)
        while any(node not in harness.tree.spans for node in droppable(harness)):
            harness.evict(1)
    assert held(harness) == {0, 1} and rounds >= 2
    harness.check()


def drop_all(nodes, strategy):
    """Drop one leaf at a time, in order; other leaves are used in between."""
    chooser, order = random.Random(0), []
    while nodes:
        node = min(nodes, key=strategy.get_priority)
        if isinstance(strategy, CostAwareRecency):
            strategy.raise_level(strategy.get_priority(node))
        nodes.remove(node)
        order.append(node.name)
        if nodes and chooser.random() < 0.5:
            chooser.choice(nodes).last_access_time = time.monotonic()
    return order


def leaves(count: int) -> list[SimpleNamespace]:
    class Leaf(SimpleNamespace):
        __hash__ = object.__hash__

    return [Leaf(name=i, last_access_time=time.monotonic()) for i in range(count)]


def recency_of(spans):
    """The order over leaves with these spans, of which none is retained."""
    table = SimpleNamespace(spans=spans, retained={})
    return CostAwareRecency(table, time.monotonic, lambda: 0)


def credits(strategy, nodes):
    return [strategy.get_priority(node)[0] for node in nodes]


@pytest.mark.parametrize("max_levels", [1024, 3])
def test_leaves_that_save_the_same_go_in_order_of_recency(monkeypatch, max_levels):
    monkeypatch.setattr(recency_module, "MAX_LEVELS", max_levels)
    assert drop_all(leaves(60), recency_of({})) == drop_all(leaves(60), LRUStrategy())


def test_credit_is_the_level_at_the_last_access_and_what_a_slot_saves():
    nodes = leaves(2)
    span = SimpleNamespace(segment=SimpleNamespace(tokens_per_slot=5.0))
    recency = recency_of({nodes[1]: span})
    assert credits(recency, nodes) == [1.0, 5.0]
    recency.raise_level((1.0, 0.0))
    nodes += leaves(1)
    assert credits(recency, nodes) == [1.0, 5.0, 2.0]
    recency.raise_level((0.5, 0.0))
    assert credits(recency, leaves(1)) == [2.0]


def test_the_levels_do_not_grow_without_bound(monkeypatch):
    monkeypatch.setattr(recency_module, "MAX_LEVELS", 4)
    recency, old = recency_of({}), leaves(1)
    for level in range(1, 20):
        recency.raise_level((float(level), 0.0))
    assert credits(recency, [*old, *leaves(1)]) == [16.0, 20.0]


def test_a_node_that_left_is_not_kept_alive():
    nodes = recency_module.NodeSet()
    first, second = leaves(2)
    nodes.add(first)
    nodes.add(second)
    nodes.discard(first)
    assert nodes.take_new() == [second] and nodes == {second}
