"""The life of a prefix, in what is counted of it; what it holds: the random machines and test_tree.py."""

from __future__ import annotations

from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from helpers.documents import document, make_harness, ranges, reading, reclaim
from helpers.harness import Harness
from sgl_kvevict.events.totals import Totals
from sgl_kvevict.guard import Place

DOCUMENT = document(0, 18)


def cache(**fields) -> tuple[Harness, Totals]:
    harness = make_harness(**fields)
    return harness, harness.tree.prefixes.totals


def test_several_nodes_become_one_segment():
    harness, totals = cache(min_prefix_tokens=16)
    for end in (5, 11):
        harness.finish(harness.run([*DOCUMENT[:end], 50]))  # too short to be compressed
    harness.finish(harness.run(DOCUMENT))
    assert ranges(harness) == [(0, 5), (5, 11), (11, 18)] and (totals.compressions, totals.compressed_tokens) == (1, 18)
    assert len({span.segment for span in harness.tree.spans.values()}) == 1


def test_a_lock_that_no_reader_explains_is_waited_for():
    harness, totals = cache()
    req = harness.request(DOCUMENT)
    assert harness.admit(req) and harness.prefill(req, 12)
    lock = harness.tree.lock(req.last_node)
    assert harness.prefill(req)
    assert ranges(harness) == [] and len(harness.tree.prefixes.table.open) == 1
    assert totals.refused_in_use == 1
    harness.tree.unlock(lock)
    harness.finish(req)
    assert ranges(harness)[0][0] == 0 and ranges(harness)[-1][1] == 18


def test_many_prompts_behind_what_a_reader_holds_cost_one_question_for_its_readers(monkeypatch):
    """However many requests end, and leaves go, while a request with `exact` reads what all prompts begin with."""
    monkeypatch.setattr("sgl_kvevict.cache.resize.MAX_OPEN", 4)
    harness, totals = cache()
    prefixes, header = harness.tree.prefixes, DOCUMENT[:8]
    reader = reading(harness, header)
    for number in range(1, 8):
        harness.finish(harness.run([*header, *document(number, 8)]))
    assert ranges(harness) == [] and len(prefixes.table.open) == 4 and totals.refused_in_use == 8
    asked, movable = [], prefixes.readers.movable
    monkeypatch.setattr(prefixes.readers, "movable", lambda node: asked.append(node) or movable(node))
    prefixes.resizer.try_open()
    reclaim(harness)
    assert len(asked) == 1
    harness.finish(reader)
    assert ranges(harness) == [(0, 8), *3 * [(8, 16)]] and not prefixes.table.open


def test_the_rest_of_what_cannot_be_split_is_worth_nothing():
    harness, totals = cache(splittable=False, min_prefix_tokens=16, min_budget=None)
    for suffix in (50, 51):
        harness.finish(harness.run([*DOCUMENT[:8], suffix]))
    for _ in range(2):
        harness.evict(1)  # a branch of one token: what is left is no branching point
    harness.finish(harness.run(document(0, 20)))
    assert ranges(harness) == [(0, 8), (8, 18)]
    assert len({span.segment for span in harness.tree.spans.values()}) == 1
    harness.evict(1)  # the tail
    harness.evict(1)
    assert (totals.dropped_spans, totals.dropped_slots) == (2, 4 + 9)  # with two branches and the tail


def test_without_memory_of_the_device_a_leaf_goes_and_what_was_read_of_it_stays(monkeypatch):
    """The rest is written anew when its last part is dropped: that may fail, and must not end the server."""
    harness, totals = cache()
    harness.finish(harness.run(DOCUMENT))
    reader = harness.run([*DOCUMENT[:8], 50])
    monkeypatch.setattr(harness.tree.packer, "_laid_out", lambda *args: [].pop())
    monkeypatch.setattr(harness.tree.prefixes.pressure, "reclaim", lambda *_: 0)
    num_dropped = totals.dropped_nodes
    harness.tree.evict(EvictParams(num_tokens=1))
    harness.check()
    assert totals.dropped_nodes > num_dropped and (0, 8) in ranges(harness) and (8, 18) not in ranges(harness)
    assert harness.tree.guard.errors[Place.COMPRESSION] == 1 and totals.repacks == 0
    monkeypatch.undo()
    assert reclaim(harness)
    harness.decode(reader)


def test_a_request_that_will_not_be_cached_is_not_observed():
    """Nothing would ever use what was seen, and end it."""
    harness, _ = cache()
    harness.finish(harness.run(DOCUMENT))
    req = harness.uncached_request([*DOCUMENT, 50])
    assert harness.admit(req) and harness.tree.prefixes.readers[req].observation is None
    assert harness.tree.observe(req, 18, 19) == []
    assert harness.tree.prefixes.readers[req].is_live
    harness.prefill(req)
