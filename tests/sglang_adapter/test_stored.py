"""Segments leave one pool as bytes and come back into another one's slots: contents and conservation."""

from __future__ import annotations

import math

import pytest
import torch

from helpers.documents import ranges, reading
from helpers.harness import DOCUMENT, WINDOWS, Harness
from helpers.harness_store import adoption, exported
from sgl_kvevict.config import KVEvictConfig
from sgl_kvevict.sglang_adapter.monitoring.server_info import cache_state

TURN = [*DOCUMENT, *(i * 5 % 11 for i in range(40))]


def stored(prompts, **kind):
    """Segments that a server makes of prompts."""
    harness = Harness(**kind)
    for prompt in prompts:
        harness.finish(harness.run(prompt))
    return exported(harness)


def adopted(harness, record, rest=()):
    """How much of a segment comes into a tree, which is sound afterwards."""
    num_tokens = adoption(harness).adopt(record, (None, None), rest)
    harness.check()
    return num_tokens


@pytest.mark.parametrize("windows", [(), WINDOWS])
def test_a_segment_comes_back_into_another_pool(windows):
    (record,) = stored([DOCUMENT], windows=windows)
    harness = Harness(num_slots=90, windows=windows)
    harness.finish(harness.run([9, 9, 9]))  # so that slots are others
    assert adopted(harness, record)
    end = 56 if windows else 60  # what cannot be split ends before the tail
    assert ranges(harness) == [(0, end)]
    assert cache_state(harness.tree)["span_slots"] == math.ceil(0.3 * end) and harness.tree.protected_size() == 0
    assert harness.serve([*DOCUMENT[:end], 10, 10, 10]) == end
    again = exported(harness)[0]
    assert torch.equal(again.kept.rows.k, record.kept.rows.k)
    assert torch.equal(again.kept.rows.positions, record.kept.rows.positions)
    assert again.key == record.key and (
        again.kept.rows.order is None or torch.equal(again.kept.rows.order, record.kept.rows.order)
    )


def test_turns_come_back_one_after_the_other():
    records = stored([DOCUMENT, TURN], num_slots=240)
    assert [(record.start, record.end) for record in records] == [(0, 60), (60, 100)]
    harness = Harness(num_slots=240)
    assert not adopted(harness, records[1])  # what comes before it is not there
    assert cache_state(harness.tree)["free_slots"] == 240
    for record in records:
        assert adopted(harness, record)
    assert harness.serve([*TURN, 10, 10]) == 100


def test_uncompressed_nodes_give_way_under_their_readers():
    (record,) = stored([DOCUMENT])
    harness = Harness(num_slots=240, config=KVEvictConfig(budget=0.3, tail_tokens=4, min_prefix_tokens=50))
    reader = harness.run(DOCUMENT[:20])
    assert ranges(harness) == []
    assert adopted(harness, record)
    assert ranges(harness) == [(0, 20), (20, 60)]
    harness.decode(reader)
    harness.finish(reader)
    assert harness.serve([*DOCUMENT, 10]) == 60


@pytest.mark.parametrize("who", ["a branch", "a reader", "nobody"])
def test_what_cannot_be_cut_takes_no_place_where_others_would_read_its_beginning(who):
    """A prompt that goes on elsewhere, or a request that generates behind the shorter prompt."""
    (record,) = stored([DOCUMENT], windows=WINDOWS)
    config = KVEvictConfig(budget=0.3, tail_tokens=4, min_prefix_tokens=50)
    harness = Harness(num_slots=240, config=config, windows=WINDOWS)
    if who == "a branch":
        for other in (9, 8):
            harness.finish(harness.run([*DOCUMENT[:20], *[other] * 5]))
    reader = harness.run(DOCUMENT[:20])
    if who != "a reader":
        harness.finish(reader)
    free = harness.allocator.available_size()
    assert adopted(harness, record) == (56 if who == "nobody" else 0)
    if who == "nobody":
        assert harness.serve([*DOCUMENT[:56], 10]) == 56
        return
    assert harness.allocator.available_size() == free and ranges(harness) == []
    if who == "a branch":
        assert harness.serve([*DOCUMENT[:20], *[9] * 5, 10]) == 25
    else:
        harness.decode(reader)
        harness.finish(reader)


def test_who_reads_exactly_is_left_alone():
    (record,) = stored([DOCUMENT])
    harness = Harness(num_slots=240, config=KVEvictConfig(budget=0.3, tail_tokens=4, min_prefix_tokens=50))
    reader = reading(harness, DOCUMENT[:20])
    free = harness.allocator.available_size()
    assert not adopted(harness, record)
    assert harness.allocator.available_size() == free and ranges(harness) == []
    harness.decode(reader)
    harness.finish(reader)


def test_others_give_way_as_for_any_insertion():
    (record,) = stored([DOCUMENT])
    harness = Harness(num_slots=30)
    harness.finish(harness.run([9] * 5 + [8] * 20))
    assert adopted(harness, record)
    assert (0, 60) in ranges(harness)
    full = Harness(num_slots=24, config=KVEvictConfig(budget=0.3, tail_tokens=4, min_prefix_tokens=50))
    reader = full.run([9] * 5 + [8] * 5)
    assert not adopted(full, record)
    full.finish(reader)


def test_a_segment_finds_its_place_among_keys_of_pairs():
    """Of 60 tokens 59 are cached. A prompt that goes on finds the whole segment, another one all but its last token."""
    (record,) = stored([DOCUMENT], keys_are_pairs=True)
    assert (record.end, record.tokens.tolist()) == (59, DOCUMENT[:59])
    for rest, prefix_len in ((DOCUMENT[59:], 59), ([], 58)):
        harness = Harness(keys_are_pairs=True)
        assert adopted(harness, record, rest=rest) == 59 and adopted(harness, record, rest=rest) == 0
        assert harness.serve([*DOCUMENT, 10, 10]) == prefix_len
    plain = Harness()
    assert adopted(plain, record) == 59  # of a server whose keys are tokens
    assert plain.serve([*DOCUMENT[:59], 10]) == 59
