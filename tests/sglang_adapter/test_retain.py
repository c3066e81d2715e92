"""A prefix that a client wants to stay counts as used until its time has come, and keeps nothing from others."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from helpers.documents import document, make_harness, nodes_of
from helpers.harness import Harness
from sgl_kvevict.cache import cache as cache_module


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Seconds that pass when a test says so."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(cache_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def cache(num_slots: int = 100, **fields) -> Harness:
    """A document takes 5 token slots; by default the pool has room for twenty."""
    return make_harness(num_slots, budget=0.25, min_budget=0.25, **fields)


def ask(harness, tokens, seconds=None, namespace=None):
    """Run a request to its end."""
    req = harness.request(tokens, namespace, None if seconds is None else {"retain": seconds})
    req.sampling_params.max_new_tokens = 1
    assert harness.admit(req) and harness.prefill(req)
    if req in harness.live:
        harness.finish(req)


def burst(harness, first=10):
    """Ask for documents that take four times the pool."""
    for number in range(first, first + 80):
        ask(harness, document(number))


@pytest.mark.parametrize(
    ("options", "seconds", "expected"),
    [
        *((options, *found) for options in ({}, {"policy": None}) for found in ((None, 0), (600, 20))),
        ({"eviction_policy": "fifo"}, 600, 0),  # an order of SGLang is followed as ever
    ],
)
def test_it_is_found_after_a_burst_of_four_times_the_pool(options, seconds, expected):
    harness = cache(options=options)
    ask(harness, document(1), seconds)
    burst(harness)
    assert min(harness.found([*document(1), 7]), 20) == expected


@pytest.mark.parametrize(("seconds", "again", "expected"), [(60, None, 0), (60, 1, 0), (60, 600, 20), (600, 1, 20)])
def test_its_time_ends_unless_a_request_with_retain_finds_it(clock, seconds, again, expected):
    """A shorter time leaves a longer one as it is."""
    harness = cache()
    ask(harness, document(1), seconds)
    burst(harness)
    clock.now += 59
    ask(harness, document(1), again)
    clock.now += 2
    burst(harness, 200)
    assert harness.found([*document(1), 7]) == expected


@pytest.mark.parametrize("num_shared", [9, 3])
def test_both_halves_of_a_cut_prefix_count_as_used(num_shared):
    harness = cache()
    ask(harness, document(1), 600)
    ask(harness, [*document(1)[:num_shared], 50, 51])
    assert len(nodes_of(harness, 1)) >= 2
    burst(harness)
    assert harness.found([*document(1), 7]) == 20


def test_its_question_goes_like_any_other():
    harness = cache()
    ask(harness, document(1), 600)
    ask(harness, [*document(1), 198, 199])
    (*_, question) = nodes_of(harness, 1)
    assert len(question.key) == 2 and question not in harness.tree.prefixes.table.retained
    burst(harness)
    assert sum(len(node.key) for node in nodes_of(harness, 1)) == 20


def test_nothing_is_kept_from_others():
    """All that is in the pool is retained, in any namespace; a prompt that needs it gets it."""
    harness = cache(64)
    for number in range(1, 11):
        ask(harness, document(number), 86_400, f"client {number % 2}")
    assert harness.tree.evictable_size() == harness.tree.held_slots() > 40
    running = harness.run(document(20, 55))
    assert running in harness.live
    harness.finish(running)
    assert harness.evict(harness.num_slots) and harness.tree.held_slots() == 0


def test_what_is_retained_later_stays_longer_than_what_waits_for_nobody():
    """More is retained than fits: the pool stays full of what is retained, and admits everybody."""
    harness = cache()
    for number in range(1, 41):
        ask(harness, document(number), 600)
    burst(harness, 50)
    staying = [number for number in range(1, 41) if nodes_of(harness, number)]
    assert len(staying) >= 10


def test_a_request_that_is_retracted_retains_again():
    harness = cache()
    req = harness.request(document(1), options={"retain": 60})
    for _ in range(2):
        assert harness.admit(req) and harness.prefill(req)
        harness.retract(req)
    assert nodes_of(harness, 1) and harness.tree.prefixes.table.retained[nodes_of(harness, 1)[0]] == 160_000
