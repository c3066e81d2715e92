"""What clients want to stay stays, in bounds and as long as they said."""

from __future__ import annotations

import math

import pytest

from helpers.admission import LongPromptScheduler
from helpers.documents import document, make_harness, nodes_of
from helpers.harness import Harness, publish_server_args
from helpers.passes import MiniScheduler
from sgl_kvevict.cache import hints as hints_module

TAIL = 2
SHARES = {"budget": 0.25, "min_budget": 0.1}
"""Of 20 tokens 10, 5 and 2 token slots, with rows of 16 bits."""


@pytest.fixture(scope="module", autouse=True)
def server_args(tmp_path_factory):
    publish_server_args(tmp_path_factory.mktemp("tiny-llama"))


def cache(num_slots: int = 400, *, options=None, **fields) -> Harness:
    """Prefixes shrink when slots are short, not before; nothing is copied to the host unless ``options`` say so."""
    return make_harness(
        num_slots, needs_passes=True, options={"scores_any_range": True} | (options or {}), **(SHARES | fields)
    )


@pytest.fixture
def harness():
    return cache()


def ask(harness, tokens, hint=None, *, namespace=None):
    """Run a request to its end; return what its client is told."""
    req = harness.request(tokens, namespace, hint)
    req.sampling_params.max_new_tokens = 1
    assert harness.admit(req) and harness.prefill(req)
    if req in harness.live:
        harness.finish(req)
    return harness.tree.prefixes.readers[req].report


def retain(harness, number, seconds=1.0, **fields) -> int:
    """Ask for a document that is to stay; return how many of its tokens do."""
    hint = {"retain": {"seconds": seconds, **{key: fields.pop(key) for key in ("share",) if key in fields}}}
    return ask(harness, document(number), hint, **fields).retained


def slots(harness, number) -> int:
    """Token slots of a document's nodes."""
    return sum(harness.tree.node_slots(node) for node in nodes_of(harness, number))


def busy(harness, number=90):
    """Two running requests, so that none runs alone; they are too short to shrink."""
    reqs = [harness.run(document(number + i, 5)) for i in range(2)]
    assert all(req in harness.live for req in reqs)
    return reqs


def squeeze(harness) -> None:
    """Take everything that can be had beside two running requests, as admission is told."""
    reqs = busy(harness)
    promised = harness.tree.evictable_size()
    assert harness.evict(harness.num_slots) == promised
    assert harness.tree.evictable_size() == 0
    for req in reqs:
        harness.finish(req)


# ---- retain ---------------------------------------------------------------------------------------------------


def test_what_is_retained_keeps_its_share_and_the_rest_goes(harness):
    assert ask(harness, document(1)).retained is None
    assert retain(harness, 2) == 22 - TAIL
    assert retain(harness, 3, share=0.1) == 22 - TAIL
    squeeze(harness)
    assert [slots(harness, number) for number in (1, 2, 3)] == [0, 5, 2]
    assert ask(harness, [*document(2), 7]) is not None and slots(harness, 2) >= 5


def test_a_share_between_two_steps_is_kept(harness):
    assert retain(harness, 1, share=0.2) == 20
    squeeze(harness)
    assert slots(harness, 1) == 4


@pytest.mark.parametrize("share", [0.12, 0.15, 0.2])
def test_what_was_promised_comes_back_also_if_the_segment_loses_tokens_first(harness, share):
    """Admission counts with a segment of 38 tokens: the smaller one that is left must shrink to the same size."""
    ask(harness, [*document(1), *document(2, 18)])
    assert harness.evict(1) == 38 // 2
    assert retain(harness, 1, share=share) == 20
    harness.run(document(1))
    busy(harness)
    promised, before = harness.tree.evictable_size(), harness.allocator.available_size()
    for node in reversed(nodes_of(harness, 2)):
        assert harness.tree.drop(node)
    harness.evict(harness.num_slots)
    assert harness.allocator.available_size() >= before + promised


def test_it_ends_with_its_time_also_while_slots_are_short(harness):
    scheduler = MiniScheduler(harness)
    scheduler.turn()
    retain(harness, 1, seconds=3 * scheduler.turn_s)
    for _ in range(3):
        assert nodes_of(harness, 1)
        squeeze(harness)
        assert slots(harness, 1) == 5
        scheduler.turn()
    assert not harness.tree.prefixes.table.retained
    squeeze(harness)
    assert slots(harness, 1) == 0


def test_the_longer_time_and_the_larger_share_of_two_hints_count(harness):
    scheduler = MiniScheduler(harness)
    retain(harness, 1, seconds=0.01, share=0.25)
    retain(harness, 1, seconds=60, share=0.1)
    retain(harness, 1, seconds=0.01, share=0.1)
    scheduler.turn()
    squeeze(harness)
    assert slots(harness, 1) == 5 + 1  # of 19 tokens, and the last one, where a match has ended
    assert len(harness.tree.prefixes.table.retained) == 2


def test_both_halves_of_a_cut_prefix_stay(harness):
    retain(harness, 1)
    ask(harness, [*document(1)[:9], 50, 51])
    assert len(harness.tree.prefixes.table.retained) == 2
    squeeze(harness)
    assert len(nodes_of(harness, 1)) >= 2 and 5 <= slots(harness, 1) <= 6
    ask(harness, [*document(1)[:5], 60, 61])  # one that is packed is cut, too
    assert len(harness.tree.prefixes.table.retained) == 3
    squeeze(harness)
    assert 5 <= slots(harness, 1) <= 6


def test_a_longer_prompt_behind_it_is_not_held_by_it(harness):
    """The nodes of a retained prefix that become part of a larger segment keep what is theirs."""
    tokens = document(1, 80)
    ask(harness, tokens[:10], {"retain": {"seconds": 5.0}})
    ask(harness, tokens)
    squeeze(harness)
    assert slots(harness, 1) == 2


@pytest.mark.parametrize("num_shared", [2, 3, 9, 30])
def test_a_beginning_that_stays_at_a_larger_share_keeps_no_more_of_what_follows(num_shared):
    """Another prompt keeps the first tokens at 0.25; if they are too few alone, they are packed with those after."""
    harness, tokens = cache(800), document(1, 62)
    ask(harness, tokens, {"retain": {"seconds": 9.0, "share": 0.1}})
    ask(harness, [*tokens[:num_shared], *document(2, 30)], {"retain": {"seconds": 9.0}})
    busy(harness)
    promised = harness.tree.evictable_size()
    assert harness.evict(harness.num_slots) >= promised > 0
    assert slots(harness, 1) <= math.ceil(0.25 * num_shared) + math.ceil(0.1 * (60 - num_shared)) + 1


@pytest.mark.parametrize("namespaces", [[None] * 8, ["a", "b"] * 4])
def test_a_client_gets_its_part_of_the_pool_and_all_together_theirs(namespaces):
    """Of 320 slots 40 may be kept, by one namespace 20; each document keeps 5."""
    harness = cache(320, retain_share=0.125)
    done = [retain(harness, number, namespace=name) for number, name in enumerate(namespaces, 1)]
    expected = [20 * (namespaces[:i].count(name) < 4) for i, name in enumerate(namespaces)]
    assert done == expected
    squeeze(harness)
    assert harness.tree.prefixes.hints.retained_slots() == 5 * sum(map(bool, expected)) <= 40


def test_all_namespaces_together_are_bounded():
    harness = cache(320, retain_share=0.125)
    done = [retain(harness, number, namespace=f"client {number}") for number in range(1, 13)]
    assert done == [20] * 8 + [0] * 4


def test_nodes_are_bounded(harness, monkeypatch):
    monkeypatch.setattr(hints_module, "MAX_NODES", 4)
    assert [retain(harness, number) for number in (1, 2, 3)] == [20, 20, 0]
    assert len(harness.tree.prefixes.table.retained) == 2


def test_a_refused_hint_leaves_an_older_one_as_it_was():
    harness = cache(320, retain_share=0.02)  # six slots, three of one namespace
    assert retain(harness, 1, seconds=60, share=0.1) == 20
    before = dict(harness.tree.prefixes.table.retained)
    assert retain(harness, 1, seconds=90) == 0
    assert dict(harness.tree.prefixes.table.retained) == before


@pytest.mark.parametrize(
    "fields",
    [
        {"retain_share": 0.0},
        {"options": {"eviction_policy": "lfu"}},
        {"options": {"has_sessions": True}},
        {"min_prefix_tokens": 21},
    ],
)
def test_where_nothing_can_be_retained_the_client_is_told(fields):
    harness = cache(**fields)
    assert retain(harness, 1) == 0
    assert not harness.tree.prefixes.table.retained


def test_nothing_is_retained_of_segments_that_cannot_be_cut():
    harness = make_harness(splittable=False)
    assert retain(harness, 1) == 0


def test_a_request_that_runs_alone_gets_what_is_retained_soonest_ending_first():
    harness = cache(64, retain_share=0.5)
    assert [retain(harness, 1, seconds=60), retain(harness, 2, seconds=30)] == [20, 20]
    assert harness.tree.evictable_size() == harness.tree.held_slots()
    alone = harness.request(document(3, 55))
    assert harness.admit(alone) and harness.prefill(alone)
    assert slots(harness, 2) == 2 and slots(harness, 1) == 5
    assert harness.decode(alone)
    harness.finish(alone)
    assert harness.evict(harness.num_slots) and harness.tree.held_slots() == 0


def test_beside_others_it_is_no_room_for_a_request():
    harness = cache(64, retain_share=0.5)
    retain(harness, 1)
    busy(harness)
    assert harness.tree.evictable_size() == 22 - 5
    third = harness.request(document(3, 55))
    assert harness.admit(third) and not harness.prefill(third)
    assert slots(harness, 1) == 5


def test_admission_of_one_more_request_does_not_count_on_it():
    harness = cache(64, retain_share=0.5)
    retain(harness, 1)
    ask(harness, document(2))
    hints, tree = harness.tree.prefixes.hints, harness.tree
    everything = tree.held_slots()
    with hints.yielding(0):
        assert tree.evictable_size() == everything  # nothing runs
    running = harness.run(document(3, 6))
    with hints.yielding(0):
        strict = tree.evictable_size()
    assert tree.evictable_size() - strict == 5 and running in harness.live
    with hints.yielding(tree.prefixes.readers.num_running):  # what SGLang has admitted gets its slots
        assert tree.evictable_size() - strict == 5


def test_sglang_admits_a_large_prompt_once_nothing_else_runs():
    harness = cache(100, retain_share=0.5)
    scheduler = LongPromptScheduler(harness, chunk=100)
    assert [retain(harness, number) for number in (1, 2)] == [20, 20]
    running = harness.run(document(3, 5))
    for number, length in ((4, 76), (5, 89)):  # with the 10 slots that are kept the first would fit beside the other
        req = harness.request(document(number, length))
        assert scheduler.submit(req) is None
        if running in harness.live:
            assert not scheduler.round() and len(harness.tree.prefixes.table.retained) == 2
            harness.finish(running)
        assert scheduler.round() == [req]
        while len(req.output_ids) < 8:
            assert harness.decode(req)
        harness.finish(req)
    assert len(harness.tree.prefixes.table.retained) == 2  # it has shrunk itself


def test_what_its_reader_locks_shrinks_to_the_share_alone_and_an_abort_changes_nothing(harness):
    retain(harness, 1)
    reader = harness.request([*document(1), 7])
    assert harness.admit(reader)
    busy(harness)
    assert harness.tree.evictable_size() == 15
    assert harness.evict(400) == 15
    harness.abort(reader)
    assert slots(harness, 1) == 5 + TAIL and harness.evict(400) == harness.tree.evictable_size() + TAIL


def test_an_exact_reader_holds_it_whole_until_it_ends(harness):
    retain(harness, 1)
    reader = harness.request([*document(1), 7])
    harness.tree.prefixes.readers[reader].is_exact = True
    assert harness.admit(reader) and harness.prefill(reader)
    busy(harness)
    assert harness.evict(400) == harness.tree.evictable_size() == 0
    harness.finish(reader)
    assert harness.evict(400) > 0 and slots(harness, 1) == 5


def test_a_flush_and_new_weights_forget_it(harness):
    retain(harness, 1)
    harness.flush()
    assert not harness.tree.prefixes.table.retained
    retain(harness, 2)
    harness.tree.forget_compressed()
    assert not harness.tree.prefixes.table.retained
    squeeze(harness)
    assert slots(harness, 2) == 0


def test_a_request_that_is_retracted_retains_once(harness):
    req = harness.request(document(1), options={"retain": {"seconds": 5.0}})
    for _ in range(2):
        assert harness.admit(req) and harness.prefill(req)
        assert harness.tree.prefixes.readers[req].report.retained == 20
        harness.retract(req)
    assert len(harness.tree.prefixes.table.retained) == 1
