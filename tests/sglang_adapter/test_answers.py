"""Answers are compressed while they are generated: a block of an answer is a range like any other."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from helpers.admission import HookedAdder
from helpers.documents import ranges, reading
from helpers.harness import CONFIG, Harness
from helpers.pseudo_random_policy import PseudoRandomPolicy
from helpers.verify_machines import VerifyingHarness
from sgl_kvevict.cache.nodes import length_of, path_to
from sgl_kvevict.policies.signals import Signal
from sgl_kvevict.sglang_adapter import operations

DOCUMENT = [i * 7 % 11 for i in range(40)]
BLOCK, TAIL = 10, 4
found = Harness.serve


def make(kind=Harness, **changes):
    config = CONFIG.model_copy(update={"answer_block": BLOCK, **changes.pop("config", {})})
    return kind(**{"num_slots": 400, "config": config, **changes})


def generate(harness, req, count):
    for _ in range(count):
        assert harness.decode(req)
        harness.turn()


def text_of(req):
    return [*req.origin_input_ids, *req.output_ids]


def test_blocks_are_compressed_while_the_answer_grows_and_its_end_when_it_is_finished():
    harness = make()
    req = harness.run(DOCUMENT)
    generate(harness, req, 13)
    assert ranges(harness) == [(0, 40)]  # 13 tokens have KV, 4 of which are the last ones
    generate(harness, req, 1)
    assert ranges(harness) == [(0, 40), (40, 50)]
    generate(harness, req, 17)
    assert ranges(harness) == [(0, 40), (40, 50), (50, 60)] and req.kv.cache_protected_len == 60
    held = harness.num_slots - harness.allocator.available_size()
    assert held == 12 + 2 * 6 + 11  # the prompt, two blocks, and what is not a block yet
    harness.finish(req)
    assert ranges(harness)[-1] == (60, 67)
    _, answer = harness.tree.prefixes.table.packed
    assert (answer.start, answer.end, answer.num_slots) == (40, 67, 9)
    assert found(harness, [*text_of(req)[:-1], 9, 9]) == 71


def test_the_hook_asks_the_running_requests():
    harness = make()
    req = harness.run(DOCUMENT)
    for _ in range(14):
        harness.decode(req)
    scheduler = SimpleNamespace(tree_cache=harness.tree, running_batch=SimpleNamespace(reqs=[req]))
    operations.after_ingest([], scheduler)
    harness.check()
    assert ranges(harness)[-1] == (40, 50)
    harness.finish(req)
    operations.after_ingest([], scheduler)  # SGLang filters its batch later in the turn


def test_a_token_whose_step_is_in_flight_is_not_inserted():
    harness = make(config={"tail_tokens": 1})
    req = harness.run(DOCUMENT)
    for _ in range(BLOCK):
        harness.decode(req)
    req.output_ids.pop()  # the result of the last step is not processed yet
    harness.tree.insert_answer(req)
    assert req.kv.kv_committed_len == 50 and ranges(harness) == [(0, 40)]
    req.output_ids.append(harness._next_token(req))
    generate(harness, req, 1)
    assert ranges(harness)[-1] == (40, 50)


def test_a_block_is_at_least_what_may_be_compressed():
    harness = make(config={"answer_block": 1, "min_prefix_tokens": 12})
    req = harness.run(DOCUMENT)
    generate(harness, req, 12 + TAIL)
    assert ranges(harness) == [(0, 40), (40, 52)] and sum(1 for _ in harness.tree.nodes()) == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"config": {"answer_block": None}},
        {"config": {"budget": 1.0}},
        {"policy": None},
        {"policy": PseudoRandomPolicy(needs=frozenset({Signal.WINDOW_QUERIES}), window_size=4)},
        {"windows": (5, 0)},
        {"cache_grid": 7},
    ],
    ids=["off", "whole", "none", "by queries", "windows", "places"],
)
def test_others_stay_as_they_are(changes):
    harness = make(**changes)
    req = harness.run(DOCUMENT)
    before = ranges(harness)
    generate(harness, req, 40)
    harness.finish(req)
    assert ranges(harness) == before


def test_an_exact_answer_stays_uncompressed_and_so_does_one_that_is_not_cached():
    harness = make()
    req = reading(harness, DOCUMENT)
    private = harness.uncached_request([1, *DOCUMENT])
    assert harness.admit(private) and harness.prefill(private)
    generate(harness, req, 30)
    generate(harness, private, 30)
    assert not [start for start, end in ranges(harness) if end > 40]
    harness.finish(req)
    harness.finish(private)
    assert not [start for start, end in ranges(harness) if end > 40]
    assert found(harness, [*text_of(req)[:-1], 9, 9]) == 70


def test_it_waits_for_an_exact_reader_of_its_prompt():
    harness = make()
    exact = reading(harness, DOCUMENT)
    req = harness.run([*DOCUMENT, 1])
    generate(harness, req, 30)
    assert not ranges(harness) and length_of(path_to(harness.tree.tree_core.node_by_id(req.last_node))) == 61
    harness.finish(exact)
    assert [end for _, end in ranges(harness)] == [40, 41, 51, 61]
    generate(harness, req, 10)
    harness.finish(req)


@pytest.mark.parametrize("end", ["finish", "abort", "retract"])
def test_everything_comes_back_whatever_ends_it(end):
    harness = make()
    req = harness.run(DOCUMENT)
    generate(harness, req, 27)
    getattr(harness, end)(req)
    assert harness.tree.protected_size() == 0
    if end == "retract":
        req.sampling_params.max_new_tokens = 99
        assert harness.admit(req) and req.prefix_len == 60  # it finds its own blocks
        assert harness.prefill(req)
        generate(harness, req, 15)
        harness.finish(req)
    harness.evict(harness.num_slots)
    assert harness.allocator.available_size() == harness.num_slots
    harness.flush()


def test_a_flush_and_new_weights_forget_it():
    harness = make()
    req = harness.run(DOCUMENT)
    generate(harness, req, 20)
    harness.tree.forget_compressed()
    generate(harness, req, 20)  # nobody may find what it generates now
    harness.finish(req)
    assert not ranges(harness) and found(harness, [*text_of(req), 9]) == 0
    harness.flush()


def test_two_requests_that_generate_the_same_share_its_blocks():
    harness = make()
    first, second = harness.run(DOCUMENT), harness.run(DOCUMENT)
    generate(harness, first, 30)
    held = harness.num_slots - harness.allocator.available_size()
    generate(harness, second, 30)
    assert harness.num_slots - harness.allocator.available_size() == held + 10
    other = harness.run(text_of(first)[:55] + [9] * 8)  # which splits a block
    for req in (first, second, other):
        generate(harness, req, 12)
        harness.finish(req)


def test_samples_that_are_to_come_begin_with_an_uncompressed_prompt():
    harness = make()
    prompt = harness.request(DOCUMENT)
    prompt.sampling_params.n, prompt.sampling_params.max_new_tokens = 2, 0
    assert harness.admit(prompt) and harness.prefill(prompt)
    samples = []
    for _ in range(2):
        assert not ranges(harness)
        samples.append(harness.request(DOCUMENT))
        samples[-1].sampling_params.n = 2
        assert harness.admit(samples[-1]) and harness.prefill(samples[-1])
        generate(harness, samples[-1], 20)
    assert ranges(harness)
    for req in samples:
        generate(harness, req, 12)
        harness.finish(req)
    assert ranges(harness)[-1][1] >= 60


@pytest.mark.parametrize("changes", [{"config": {"compress": "when short"}}, {"waits": True}], ids=["all", "share"])
def test_what_waits_until_slots_are_short_shrinks_then(changes):
    harness = make(num_slots=120, **changes)
    req = harness.run(DOCUMENT)
    generate(harness, req, 40)
    assert not ranges(harness) and harness.tree.prefixes.pressure.reclaimable() > 0
    harness.evict(harness.allocator.available_size() + 20)
    assert ranges(harness)
    generate(harness, req, 60)
    harness.finish(req)


def test_an_answer_may_be_longer_than_the_pool():
    harness = make(num_slots=120, max_tokens=600)
    req = harness.run(DOCUMENT)
    generate(harness, req, 400)
    assert length_of(path_to(harness.tree.tree_core.node_by_id(req.last_node))) == 430
    harness.finish(req)


@pytest.mark.parametrize("keys_are_pairs", [False, True])
def test_drafts_that_are_not_verified_are_never_inserted(keys_are_pairs):
    harness = make(VerifyingHarness, keys_are_pairs=keys_are_pairs)
    req = harness.run(DOCUMENT)
    for _ in range(4):
        harness.verify(req, [0, 2, 3], 6)
        harness.turn()
    assert req.kv.kv_committed_len == 52 and req.kv.kv_allocated_len > 56
    assert max(end for _, end in ranges(harness)) == 40 - keys_are_pairs
    harness.verify(req, [0, 1], 6)
    harness.turn()
    assert max(end for _, end in ranges(harness)) == 50 - keys_are_pairs
    harness.verify(req, [0, 1, 2, 3, 4], 6)
    harness.finish(req, num_beyond_stop=3)
    assert sum(len(node.key) for node in harness.tree.nodes()) == 40 + req.finished_len - keys_are_pairs


@pytest.mark.parametrize(("is_exact", "num_admitted"), [(False, 1), (True, 0)])
def test_admission_counts_an_answer_with_what_it_will_hold(is_exact, num_admitted):
    """Of 160 slots 12 are the prompt's. The running answer will take 30 at the budget, and at most 14 uncompressed."""
    harness = make(num_slots=160)
    running = harness.run(DOCUMENT)
    running.sampling_params.max_new_tokens, running.sampling_params.ignore_eos = 101, True
    batch = SimpleNamespace(reqs=[running], batch_size=lambda: 1)
    adder = HookedAdder(1, harness.tree, harness.allocator, batch, 0.5, 10_000, None)
    for first in (12, 13):  # each needs 40 slots for its prompt and 44 for its answer: one fits into 160 - 12 - 44
        req = harness.request([first, *DOCUMENT[1:]])
        harness.tree.prefixes.readers[req].is_exact = is_exact
        req.sampling_params.max_new_tokens = 100
        req.init_next_round_input(harness.tree)
        adder.add_one_req(req, False, None)
    assert len(adder.can_run_list) == num_admitted and harness.tree.saved_of_answer(running, -3) == 0
    for req in adder.can_run_list:
        harness.live.append(req)
        assert harness.prefill(req)
        harness.finish(req)
    harness.finish(running)


def test_blocks_of_an_answer_become_one_and_go_to_the_budget_together():
    harness = make(host_blocks=80, scores_any_range=True)
    harness.tree.prefixes.resizer.num_joined = 4
    req = harness.run([*DOCUMENT, *DOCUMENT[::-1]])
    generate(harness, req, 43)
    assert [segment.num_slots for segment in harness.tree.prefixes.table.packed] == [24, 6, 6, 6]
    assert ranges(harness)[-1] == (100, 110)
    generate(harness, req, 1)
    prompt, joined = harness.tree.prefixes.table.packed
    assert (prompt.start, prompt.end) == (0, 80)
    assert (joined.start, joined.end, joined.num_spans) == (80, 120, 4)
    assert (joined.num_entries, joined.num_slots) == (4 * 12, 12)
    assert harness.num_slots - harness.allocator.available_size() == 24 + 12 + TAIL
    other = harness.run(text_of(req)[:95] + [9] * 8)  # which splits it
    generate(harness, req, 12)
    harness.evict(harness.num_slots)  # it shrinks
    assert joined.num_slots < 12
    generate(harness, req, 12)
    harness.finish(other)
    harness.finish(req)
    again = harness.request([*text_of(req)[:-1], 9, 9], options={"complete": True})
    harness.tree.prefixes.readers[again].least_share = 1.0
    assert harness.admit(again) and again.prefix_len == 148 and joined.num_entries > 48
    assert harness.prefill(again)
    harness.finish(again)
    harness.evict(harness.num_slots)
    assert found(harness, [*text_of(req)[:-1], 9, 9]) >= 100


def test_what_others_read_in_parts_is_not_joined():
    harness = make()
    harness.tree.prefixes.resizer.num_joined = 3
    req = harness.run(DOCUMENT)
    generate(harness, req, 14)
    other = harness.run(text_of(req)[:50])
    generate(harness, req, 27)
    assert len(harness.tree.prefixes.table.packed) == 4
    harness.finish(other)
    generate(harness, req, 10)
    assert len(harness.tree.prefixes.table.packed) < 4
    harness.finish(req)


@pytest.mark.parametrize("is_running", [True, False])
def test_an_answer_that_ends_inside_a_block_of_another_is_not_joined(is_running):
    harness = make(config={"min_prefix_tokens": 1})
    first, second = harness.run(DOCUMENT), harness.run(DOCUMENT)
    generate(harness, first, 24)
    generate(harness, second, 16)  # its last tokens are the first ones of the other's second block
    if not is_running:
        harness.retract(first)
    harness.finish(second)
    assert ranges(harness)[-3:] == [(40, 50), (50, 56), (56, 60)]
    assert found(harness, [*text_of(first)[:60], 9]) == 60
    if is_running:
        harness.finish(first)


def test_what_others_read_in_parts_shrinks_by_itself_at_the_end():
    harness = make()
    req = harness.run(DOCUMENT[:5])  # too short by itself: it becomes a part of the first block
    generate(harness, req, 14)
    other = harness.run(text_of(req)[:12])
    generate(harness, req, 10)
    assert [segment.num_slots for segment in harness.tree.prefixes.table.packed] == [9, 6]
    harness.finish(req)
    assert [segment.num_slots for segment in harness.tree.prefixes.table.packed] == [5, 3]
    harness.finish(other)


@pytest.mark.parametrize(("bits", "num_slots"), [(16, [9, 6]), ("auto", [6, 3])])
def test_a_prompt_that_is_too_short_by_itself_goes_to_the_budget_with_the_blocks(bits, num_slots):
    """With its first tokens, which keep 16 bits: 5 + 20 + 9 tokens become 11 slots, 0.3 of them."""
    harness = make(bits=bits)
    req = harness.run(DOCUMENT[:5])
    generate(harness, req, 24)
    first, second = harness.tree.prefixes.table.packed
    assert [first.num_slots, second.num_slots] == num_slots and first.packed.num_sinks == (2 if bits == "auto" else 0)
    generate(harness, req, 9)
    harness.finish(req)
    (whole,) = harness.tree.prefixes.table.packed
    assert (whole.start, whole.end, whole.num_slots) == (0, 34, 11)
    assert whole.packed.num_sinks == first.packed.num_sinks


@pytest.mark.parametrize(("block", "share"), [(BLOCK, 0.6), (2048, 0.6), (2049, None)])
def test_large_blocks_go_to_the_budget_at_once(block, share):
    assert make(config={"answer_block": block}).tree.prefixes.resizer.block_share == share
