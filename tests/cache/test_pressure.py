"""What shrinks when token slots are short, and in which order; that it may be counted on: the random machines."""

from __future__ import annotations

import pytest
import torch

from helpers.documents import admitted, document, make_harness, nodes_of, ranges, reading, reclaim
from helpers.harness import Harness
from helpers.pseudo_random_policy import PseudoRandomPolicy
from sgl_kvevict.cache.pressure import WITH_16_BITS, WITH_FEW_BITS
from sgl_kvevict.errors import InvariantError
from sgl_kvevict.policies.order import LARGEST
from sgl_kvevict.segments.prompt_observation import CacheObservation, PromptObservation

BELOW = {"budget": 0.25, "min_budget": 0.1}
"""Shares 0.25 and 0.1 in rows of 16 bits."""


def cache(num_slots: int = 320, *, bits: int | str = 16, **fields) -> Harness:
    """Prefixes stay uncompressed until slots are short; of 320 slots 5 are released at once, of 64 one."""
    options = {"bits": bits}
    return make_harness(num_slots, waits=True, options=options, **({"min_budget": 0.25} | fields))


def cached(harness: Harness, number: int = 0, tokens: list[int] | None = None, *, at: float | None = None):
    """A prompt without readers, last used at a time; of 20 tokens."""
    harness.finish(harness.run(tokens or document(number)))
    for node in nodes_of(harness, number):
        node.last_access_time = node.last_access_time if at is None else at
    return nodes_of(harness, number)[0]


@pytest.fixture
def harness() -> Harness:
    """One prompt without readers is in the cache."""
    harness = cache()
    cached(harness)
    return harness


def slots(harness: Harness) -> dict[int, int]:
    """Token slots of packed segments by their document, each of one span."""
    return {node.key.token_ids[0] // 100: span.segment.num_slots for node, span in harness.tree.spans.items()}


def entries(harness: Harness) -> dict[int, int]:
    """Entries of the only segment per run, on average, by the bits of their rows."""
    (segment,) = {span.segment for span in harness.tree.spans.values()}
    return {bits: count // harness.geometry.num_runs for bits, count in segment.entries_by_bits.items()}


def test_nothing_is_compressed_while_there_is_room(harness):
    assert slots(harness) == {} and len(harness.tree.prefixes.table.shrinking) == 1


@pytest.mark.parametrize("scores_any_range", [False, True])
def test_when_short_every_prompt_waits_and_goes_to_the_budget(scores_any_range):
    harness = make_harness(compress="when short", options={"scores_any_range": scores_any_range})
    reader = harness.run(document(0))
    assert harness.decode(reader) and slots(harness) == {}
    assert [each.waits for each in harness.tree.prefixes.table.open.values()] == [True]
    assert reclaim(harness) == 10 and slots(harness) == {0: 10} and not harness.tree.prefixes.table.open
    assert harness.decode(reader)


def test_what_is_read_of_the_beginning_of_a_range_counts(harness):
    admitted(harness, [*document(0)[:12], 7])
    assert harness.tree.prefixes.pressure.reclaimable() == 12 - 5 and reclaim(harness) == 10  # 5 of 20 slots stay


@pytest.mark.parametrize(
    ("num_slots", "fields", "released"),
    [
        (320, {}, [10, 5, 0]),
        (64, BELOW, [15, 3, 0]),
        (320, {"min_budget": None}, [10, 0]),
        (320, {"min_budget": 0.5}, [10, 0]),
    ],
)
def test_it_shrinks_in_steps_under_its_readers_which_admission_counts_on(num_slots, fields, released):
    harness = cache(num_slots, **fields)
    cached(harness)
    reader = admitted(harness, [*document(0), 7])
    for i, won in enumerate(released):
        assert harness.tree.prefixes.pressure.reclaimable() == sum(released[i:])
        assert reclaim(harness) == won
    assert slots(harness) == {0: 20 - sum(released)}
    assert harness.prefill(reader) and harness.decode(reader)  # which reads what is left


@pytest.mark.parametrize(
    ("num_sinks", "rows"),
    [
        (0, [{4: 20}, {4: 16}, {4: 8}]),
        (2, [{16: 2, 4: 12}, {16: 2, 4: 8}, {16: 2}]),
    ],
)
def test_entries_lose_bits_and_sinks_keep_theirs(num_sinks, rows):
    """Of 20 tokens: 0.25, 0.175 and 0.1 of their slots."""
    harness = cache(64, bits="auto", sink_tokens=num_sinks, **BELOW)
    cached(harness)
    admitted(harness, [*document(0), 7])
    assert harness.tree.prefixes.pressure.reclaimable() == 18
    found = []
    while won := reclaim(harness):
        found.append((won, entries(harness)))
    assert [each for _, each in found] == rows and sum(won for won, _ in found) == 18


def test_answers_are_dearest_last():
    """Each step of a prefix costs more per slot than the one before, with 4 bits as with 16."""
    for losses, saved in ((WITH_FEW_BITS, (1, 5, 8)), (WITH_16_BITS, (1, 5, 5))):
        absolute = [loss * at for loss, at in zip(losses, saved, strict=True)]
        assert absolute == sorted(absolute)


def test_what_was_used_last_shrinks_last_and_all_are_at_the_budget_before_one_is_below():
    harness = cache(64, **BELOW)
    cached(harness, 1, at=1.0)
    cached(harness, 2, at=2.0)
    found = []
    for _ in range(4):
        reclaim(harness)
        found.append(slots(harness))
    assert found == [{1: 5}, {1: 5, 2: 5}, {1: 2, 2: 5}, {1: 2, 2: 2}]


def test_an_old_span_gives_up_more_before_a_prefix_in_use_is_compressed():
    harness = cache(64, **BELOW)
    cached(harness, 1, at=1.0)
    assert reclaim(harness) == 15
    harness.tree.prefixes.recency.raise_level((20.0, 0.0))  # the level of what is used from now on
    cached(harness, 2)
    assert [reclaim(harness, (20.0, 0.0)) for _ in range(2)] == [3, 0] and slots(harness) == {1: 2}
    assert reclaim(harness) == 15 and slots(harness) == {1: 2, 2: 5}


def test_a_resize_keeps_the_first_in_order(harness):
    (node,) = nodes_of(harness, 0)
    reclaim(harness)
    runs, segment = harness.geometry.num_runs, harness.tree.spans[node].segment
    before, kept = segment.packed.rows, segment.keys.sort(descending=True).values[: 5 * runs]
    reclaim(harness)
    assert segment is harness.tree.spans[node].segment
    after = segment.packed.rows
    assert segment.keys.sort(descending=True).values.equal(kept)
    assert after.indptr[-1] == after.num_entries == 5 * runs
    for run in range(runs):
        old, new = (x.positions[x.indptr[run] : x.indptr[run + 1]].tolist() for x in (before, after))
        assert new == sorted(new) and set(new) <= set(old)


def test_a_resize_gives_no_slots(harness):
    reclaim(harness)
    (segment,), free = harness.tree.prefixes.table.packed, harness.allocator.available_size()
    held = segment.num_slots
    with pytest.raises(InvariantError, match="num_slots: got"):
        harness.tree.prefixes.resizer.resize(segment, held + 1)
    assert (segment.num_slots, harness.allocator.available_size()) == (held, free)
    harness.check()


@pytest.mark.parametrize(("tail_tokens", "sink_tokens", "kept"), [(2, 0, [19]), (1, 2, [0, 1]), (4, 0, [19])])
def test_protected_tokens_stay_in_every_head_at_every_size(tail_tokens, sink_tokens, kept):
    """Of two entries that a head keeps at the least share, sinks come first; half of the rest are the tail's."""
    harness = cache(64, tail_tokens=tail_tokens, sink_tokens=sink_tokens, **BELOW)
    cached(harness)
    sizes = []
    while reclaim(harness):
        (segment,) = {span.segment for span in harness.tree.spans.values()}
        runs = segment.packed.rows.positions.split(segment.packed.rows.indptr.diff().tolist())
        assert all(set(kept) <= set(run.tolist()) for run in runs)
        sizes.append(segment.num_slots)
    assert sizes == [5, 2]
    assert harness.tree.compressor.protected(20, 0) == (sink_tokens, len(kept) - sink_tokens)


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_chunk_of_a_prompt_that_goes_on_has_no_tail(goes_on):
    harness = cache(tail_tokens=2, min_budget=0.25)
    observation = PromptObservation(harness.tree.compressor.observes)
    observation.begin_chunk(0, 20, is_last=not goes_on)
    slots = torch.arange(1, 21)
    keys = harness.tree.compressor.rank(slots, 0, observation, 0).keys
    assert keys[..., -2:].gt(LARGEST).all() == (not goes_on) and keys[..., :-2].le(LARGEST).all()
    assert harness.tree.compressor.rank(slots, 0, CacheObservation(), 0).keys[..., -2:].gt(LARGEST).all()


def test_views_of_a_segment_are_shrunk_together(harness):
    reclaim(harness)
    harness.finish(harness.run([*document(0)[:8], 50]))  # branches off
    assert reclaim(harness) == 5
    upper, lower = (node for node in nodes_of(harness, 0) if node in harness.tree.spans)
    assert harness.tree.spans[upper].segment is harness.tree.spans[lower].segment
    assert [harness.tree.node_slots(node) for node in (upper, lower)] == [5, 0]


def test_a_leaf_that_costs_less_is_dropped_instead(harness):
    compressing = WITH_16_BITS.budget
    assert reclaim(harness, (compressing / 2, 0.0)) == 0
    assert reclaim(harness, (compressing, float("inf"))) == 10
    shrinking = 2 * WITH_16_BITS.least  # two tokens a slot
    assert reclaim(harness, (shrinking, -1.0)) == 0 and reclaim(harness, (shrinking + 1, -1.0)) == 5


def test_nothing_shrinks_below_the_budget_just_before_it_would_be_dropped_to_the_host():
    """What is uncompressed below it goes first, and then it: what comes back by a copy loses no answers."""
    harness = cache(64, bits="auto", **BELOW)
    cached(harness)
    cached(harness, 0, [*document(0), 98, 99])  # a question, too short for a segment
    while slots(harness).get(0) != 5:
        assert reclaim(harness)
    node, question = nodes_of(harness, 0)
    recency = harness.tree.prefixes.recency
    leaf = recency.get_priority(question)
    recency.has_host_room = lambda segment: True
    assert reclaim(harness, leaf) == 0 and recency.get_priority(node) < leaf
    recency.has_host_room = lambda segment: False
    assert reclaim(harness, leaf) == 1 and slots(harness) == {0: 4}


def test_what_somebody_reads_exactly_does_not_shrink_nor_count_nor_what_is_below_it(harness):
    exact = reading(harness, document(0))
    lower = harness.run([*document(0), *document(1)])
    assert harness.tree.prefixes.pressure.reclaimable() == 0 and reclaim(harness) == 0
    harness.finish(exact)
    assert reclaim(harness) > 0 and ranges(harness)
    harness.decode(lower)


def test_the_range_nearest_the_root_goes_first_whatever_their_ages():
    harness = cache()
    upper = cached(harness, 0, document(0, 12))
    harness.finish(harness.run([*document(0, 12), *document(1, 12)]))
    for node, at in ((upper, 2.0), (nodes_of(harness, 1)[0], 1.0)):
        node.last_access_time = at
    before = len(harness.tree.prefixes.table.shrinking)
    assert reclaim(harness) >= 5 and ranges(harness)[0][0] == 0 and before >= 2
    reclaim(harness)
    assert len(ranges(harness)) >= 2


def test_short_parts_are_compressed_with_what_follows():
    harness = cache(min_prefix_tokens=6)
    header = document(0)[:3]
    harness.finish(harness.run([*header, 50]))
    harness.finish(harness.run([*header, *document(1, 18)]))
    assert reclaim(harness) == 10 and ranges(harness) == [(0, 3), (3, 21)]


def test_a_round_releases_slots_for_several_requests():
    harness = cache(1280)  # 20 at once
    for number in range(3):
        cached(harness, number)
    assert reclaim(harness) == 20


def test_a_failing_policy_shrinks_nothing(harness, monkeypatch):
    monkeypatch.setattr(PseudoRandomPolicy, "order", lambda *args, **kwargs: 1 / 0)
    reader = admitted(harness, [*document(0), 7])
    assert harness.tree.prefixes.pressure.reclaimable() > 0
    assert reclaim(harness) == 0 and slots(harness) == {}
    assert sum(harness.tree.guard.errors.values()) == 1
    assert harness.tree.prefixes.pressure.reclaimable() == 0  # admission counts on it no more
    assert harness.prefill(reader)
