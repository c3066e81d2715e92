"""What the pool drops moves to the host's memory and comes back: contents, order, conservation."""

from __future__ import annotations

import pytest

from helpers.harness import WINDOWS, Harness
from sgl_kvevict.config import KVEvictConfig
from sgl_kvevict.sglang_adapter.monitoring.server_info import cache_state

DOCUMENTS = [[(i * step + step) % 11 for i in range(60)] for step in (3, 5, 7, 9)]
serve = Harness.serve


@pytest.fixture
def harness() -> Harness:
    """The first document is in the pool."""
    harness = Harness(host_blocks=60)
    serve(harness, DOCUMENTS[0])
    return harness


def found_by_source(req) -> tuple[int, int, int]:
    """What SGLang tells its client: tokens from the pool, the host and the store."""
    assert req._cache_breakdown_computed
    return req.cached_tokens_device, req.cached_tokens_host, req.cached_tokens_storage


def totals(harness):
    return harness.tree.prefixes.totals


@pytest.mark.parametrize("windows", [(), WINDOWS])
def test_what_was_dropped_comes_back_in_the_step_that_admits_a_prompt(windows):
    harness = Harness(host_blocks=60, windows=windows)
    for document in DOCUMENTS:
        serve(harness, document)
    harness.drop_all()
    state = cache_state(harness.tree)
    assert state["host_segments"] == state["moved_out_segments"] == 4
    assert 0 < state["host_used_bytes"] <= state["host_bytes"] and state["spans"] == 0
    end = 56 if windows else 60  # what cannot be split ends before the tail
    for document in DOCUMENTS:
        assert serve(harness, [*document, 1, 1]) == end
    assert totals(harness).moved_in_segments == 4 and totals(harness).moved_in_tokens == 4 * end
    assert totals(harness).moved_in_seconds > 0
    assert not any(harness.tree.guard.errors.values())


def test_clients_are_told_what_came_from_the_hosts_memory(harness):
    in_pool = harness.request([*DOCUMENTS[0], 1, 1])
    assert harness.admit(in_pool)
    # Nothing of it was loaded: SGLang's own count stands.
    assert not in_pool._cache_breakdown_computed
    harness._cancel(in_pool)
    harness.drop_all()
    from_host = harness.request([*DOCUMENTS[0], 1, 1])
    for _ in range(2):  # the first time it waits for a row
        assert harness.admit(from_host)
        assert found_by_source(from_host) == (0, 60, 0)
        harness._cancel(from_host)
    assert harness.admit(from_host) and harness.prefill(from_host)
    later = harness.request([*DOCUMENTS[0][:30], 9, 9])
    assert harness.admit(later) and later.prefix_len == 30 and not later._cache_breakdown_computed
    harness._cancel(later)
    from_host.already_computed = 58
    harness.retract(from_host)
    from_host.retracted_stain = True
    harness.drop_all()
    assert harness.admit(from_host)
    assert found_by_source(from_host) == (0, 60, 0)  # what it was told before


def test_who_waits_is_tried_again_when_more_slots_are_available(harness, monkeypatch):
    """SGLang matches the prompt of a waiting request whenever it tries to admit it; the first time the pool is full."""
    harness.drop_all()
    running = [harness.uncached_request([10] * num_tokens) for num_tokens in (5, 55, 60)]
    assert all(harness.admit(each) and harness.prefill(each) for each in running)
    assert harness.allocator.available_size() == 0
    req, prefixes, loads = harness.request([*DOCUMENTS[0], 1, 1]), harness.tree.prefixes, []
    load = prefixes.host.load
    monkeypatch.setattr(prefixes.host, "load", lambda *args: loads.append(args) or load(*args))
    for is_ending, found, num_loads in ((0, 0, 1), (0, 0, 1), (1, 0, 2), (0, 0, 2), (1, 60, 3), (0, 60, 3)):
        if is_ending:
            harness.finish(running.pop(0))
        assert harness.admit(req)
        assert (req.prefix_len, len(loads)) == (found, num_loads)
        harness._cancel(req)  # it was not admitted


@pytest.mark.parametrize("was_there", [False, True])
def test_who_waits_finds_what_the_pool_drops_meanwhile(harness, was_there):
    """When it is tried first, its prefix is still in the pool; later the pool has no more room than then."""
    if was_there:  # a copy that the host has had since it was loaded
        harness.drop_all()
        serve(harness, [*DOCUMENTS[0], 2])
    req = harness.request([*DOCUMENTS[0], 1, 1])
    assert harness.admit(req) and req.prefix_len == 60
    harness._cancel(req)
    harness.drop_all()
    assert harness.admit(req) and req.prefix_len == 60
    assert totals(harness).moved_out_segments == 1


def test_what_comes_back_keeps_nothing_alive_but_itself(harness):
    """It is copied to the device as one buffer with all keys and values, which lie in the pool now."""
    harness.drop_all()
    serve(harness, [*DOCUMENTS[0], 1])
    (segment,) = (span.segment for span in harness.tree.spans.values())
    for part in (segment.packed.rows.positions, segment.keys):
        assert part.untyped_storage().nbytes() == part.nbytes


def test_a_segment_is_copied_once():
    harness = Harness(host_blocks=60)
    for _ in range(3):
        serve(harness, DOCUMENTS[0])
        harness.drop_all()
    assert (totals(harness).moved_out_segments, totals(harness).moved_in_segments) == (1, 2)


def test_a_document_that_was_split_comes_back_whole(harness):
    serve(harness, [*DOCUMENTS[0][:30], 1, 1, 1])
    assert len(harness.tree.spans) >= 2
    harness.drop_all()
    assert len(harness.host) == 1
    assert serve(harness, [*DOCUMENTS[0], 1]) == 60


def test_a_prompt_that_leaves_a_segment_in_the_middle_uses_its_beginning(harness):
    harness.drop_all()
    assert serve(harness, [*DOCUMENTS[0][:40], *[1] * 9]) == 40


def test_a_copy_that_would_not_be_loaded_replaces_none(harness):
    """Of a copy of 60 tokens a prompt uses 30 at least: a part of 20 behind a prefix in the pool needs its own."""
    harness.drop_all()
    reader = harness.run([*DOCUMENTS[0][:20], 10])
    serve(harness, DOCUMENTS[0][:40])
    while harness.evict(1):
        pass
    assert serve(harness, [*DOCUMENTS[0][:40], 10]) == 40
    harness.finish(reader)


def test_what_branches_share_is_copied_once():
    """A system prompt of 30 tokens below which four users asked; the first one's is a segment together with it."""
    harness = Harness(host_blocks=200, num_slots=240)
    prompts = [[*DOCUMENTS[0][:30], *document[:30]] for document in DOCUMENTS]
    for prompt in prompts:
        serve(harness, prompt)

    def bounds():
        while harness.evict(1):
            pass
        return sorted((each.record.start, each.record.end) for each in harness.host._segments.values())

    reader = harness.run([*prompts[0], 1])
    assert bounds() == [(0, 30), (30, 60), (30, 60), (30, 60)]
    harness.finish(reader)
    assert bounds() == [(0, 30), (0, 60), (30, 60), (30, 60), (30, 60)]
    assert [serve(harness, [*prompt, 1]) for prompt in prompts] == [60] * 4
    assert not any(harness.tree.guard.errors.values())


def test_turns_come_back_one_after_the_other():
    harness = Harness(host_blocks=60, num_slots=240)
    turns = [*DOCUMENTS[0], *DOCUMENTS[1][:40]]
    serve(harness, DOCUMENTS[0])
    serve(harness, turns)
    harness.drop_all()
    assert len(harness.host) == 2
    assert serve(harness, [*turns, 1]) == 100


def test_namespaces_never_share():
    harness = Harness(host_blocks=60)
    serve(harness, DOCUMENTS[0], "tenant")
    harness.drop_all()
    assert serve(harness, DOCUMENTS[0]) == 0
    harness.drop_all()
    assert serve(harness, [*DOCUMENTS[0], 1], "tenant") == 60


def test_an_exact_request_finds_nothing_there(harness):
    harness.drop_all()
    req = harness.request(DOCUMENTS[0])
    harness.tree.prefixes.readers[req].is_exact = True
    assert harness.admit(req) and req.prefix_len == 0
    harness.abort(req)
    assert totals(harness).moved_in_segments == 0


@pytest.mark.parametrize("empty", [Harness.flush, lambda harness: harness.tree.forget_compressed()])
def test_a_flush_or_new_weights_empty_it(harness, empty):
    harness.drop_all()
    assert len(harness.host) == 1
    empty(harness)
    harness.check()
    assert len(harness.host) == 0 and serve(harness, DOCUMENTS[0]) == 0


def test_what_old_weights_computed_never_gets_there():
    harness = Harness(host_blocks=60)
    reader = harness.run(DOCUMENTS[0])
    harness.tree.forget_compressed()
    harness.finish(reader)
    harness.drop_all()
    assert len(harness.host) == 0


def test_uncompressed_tokens_are_compressed_on_their_way():
    """As if they were no end of a prompt (an answer, say), they do not shrink before they are dropped."""
    harness = Harness(host_blocks=60, waits=True)
    serve(harness, DOCUMENTS[0])
    table = harness.tree.prefixes.table
    for last in list(table.open):
        table.close(last)
    harness.drop_all()
    assert totals(harness).compressions == 0 and totals(harness).dropped_spans == 0
    assert serve(harness, [*DOCUMENTS[0], 1]) == 60
    (span,) = harness.tree.spans.values()
    assert span.segment.num_slots == 18  # 30 % of 60


def test_nothing_is_shrunk_below_the_budget_while_the_host_has_room():
    config = KVEvictConfig(budget=0.2, min_budget=0.05, tail_tokens=4, min_prefix_tokens=6)
    documents = [[(i * step + step) % 11 for i in range(60)] for step in range(2, 10)]

    def smallest(host_blocks: int) -> int:
        harness = Harness(config=config, num_slots=100, waits=True, host_blocks=host_blocks)
        for document in documents * 2:
            serve(harness, [*document, 1])
        assert host_blocks == 0 or totals(harness).compressions == len(documents)  # each is computed once
        return min(span.segment.num_slots for span in harness.tree.spans.values())

    assert (smallest(0), smallest(20), smallest(400)) == (4, 4, 13)  # the sinks (5 % are 4), and 20 % of 61 tokens


def test_copies_shrink_before_one_is_lost():
    """What both together can hold at the smallest share is found again, though it was dropped at the budget."""
    config = KVEvictConfig(budget=0.6, min_budget=0.1, bits=16, tail_tokens=4, min_prefix_tokens=6)
    harness = Harness(config=config, num_slots=130, host_blocks=60, waits=True)
    documents = [[(i * i * step + step) % 11 for i in range(60)] for step in range(2, 10)]
    for document in documents:
        serve(harness, document)
        harness.drop_all()
    assert len(harness.host) == len(documents) and harness.host.num_evicted == 0
    assert [serve(harness, [*document, 1]) for document in documents] == [60] * len(documents)
    assert not any(harness.tree.guard.errors.values())


def test_what_fits_half_way_is_never_read_at_the_least_share():
    """Copies give up entries before what the pool drops goes to ``min_budget``."""
    config = KVEvictConfig(tail_tokens=4, min_prefix_tokens=16)
    harness = Harness(config=config, num_slots=400, host_blocks=492, waits=True, bits=4)
    documents = [[100 + number, *((i * i * number + number) % 11 for i in range(199))] for number in range(24)]
    slots = []
    for document in documents * 3:
        found, spans = serve(harness, [*document, 1]), harness.tree.spans.items()
        slots += [span.segment.num_slots for node, span in spans if found and node.key.token_ids[0] == document[0]]
    assert len(slots) == 48 and min(slots) >= config.num_slots(200, 0, config.shares[1])
    assert not any(harness.tree.guard.errors.values())


def test_copies_of_what_the_pool_has_go_first():
    harness = Harness(host_blocks=22)
    for document in DOCUMENTS[:2]:
        serve(harness, document)
        harness.drop_all()
    serve(harness, [*DOCUMENTS[1], 1])  # the newer one is in the pool
    serve(harness, DOCUMENTS[2])
    harness.evict(harness.tree.evictable_size() - 17)
    assert len(harness.host) == 2 and harness.host.num_evicted == 0
    assert serve(harness, [*DOCUMENTS[0], 1]) == 60


def test_an_error_on_the_way_out_loses_one_prefix(harness, monkeypatch):
    monkeypatch.setattr(type(harness.host), "put", lambda *args: 1 / 0)
    harness.drop_all()
    assert serve(harness, DOCUMENTS[0]) == 0 and sum(harness.tree.guard.errors.values()) == 1


def fill(harness, num_left: int) -> None:
    """Two running requests of which nothing is cached take all free token slots but so many."""
    num_free = harness.allocator.available_size() - num_left
    for num_tokens in (num_free // 2, num_free - num_free // 2):
        req = harness.uncached_request([10] * num_tokens)
        assert harness.admit(req) and harness.prefill(req)
    assert harness.allocator.available_size() == num_left


def test_nothing_is_dropped_for_a_prefix_that_cannot_have_its_slots(harness):
    """It needs 16 token slots; two are free, and five more could be had."""
    harness.drop_all()
    serve(harness, DOCUMENTS[1][:4])
    fill(harness, 2)
    held = harness.tree.held_slots()
    assert held == harness.tree.evictable_size() == 5
    req = harness.request([*DOCUMENTS[0], 1, 1])
    assert harness.admit(req) and req.prefix_len == 0
    assert harness.tree.held_slots() == held and harness.allocator.available_size() == 2


@pytest.mark.parametrize("is_read", [False, True])
def test_a_path_that_is_held_shrinks_for_slots_and_is_not_dropped(is_read):
    """All that is promised can be had, also of a prefix that readers hold, and no slot more."""
    config = KVEvictConfig(budget=0.3, min_budget=0.1, tail_tokens=4, sink_tokens=2, min_prefix_tokens=6)
    harness = Harness(config=config, num_slots=160, waits=True)
    serve(harness, DOCUMENTS[0])
    prefixes, port = harness.tree.prefixes, harness.tree.port
    path, least = port.find(DOCUMENTS[0][:56], (None, None)), 6
    prefixes.resizer.compress(path[-1], 56, share=0.5)
    assert harness.tree.node_slots(path[-1]) == 28
    if is_read:
        req = harness.request([*DOCUMENTS[0][:56], 3])
        assert harness.admit(req) and req.prefix_len == 56 and harness.prefill(req)
    fill(harness, 0)
    with port.holding(path):
        most = port.num_available
        assert most == 5 + 28 - least  # five tokens lie below the prefix
        assert port.alloc(most + 1) is None and harness.tree.held_slots() >= 28 + 5
        assert port.alloc(most).numel() == most
    assert port.find(DOCUMENTS[0][:56], (None, None)) == path and harness.tree.node_slots(path[-1]) == least


def test_the_rest_of_a_document_keeps_the_sinks_that_another_prompt_reads():
    """In every KV head, however short what is left of it has become: the tokens with which every template begins."""
    config = KVEvictConfig(budget=0.3, min_budget=0.1, tail_tokens=4, sink_tokens=4, min_prefix_tokens=6)
    harness = Harness(config=config, host_blocks=60)
    harness.finish(harness.run(DOCUMENTS[0]))
    reader = harness.request([*DOCUMENTS[0][:4], 1, 2, 1])
    assert harness.admit(reader) and reader.prefix_len == 4 and harness.prefill(reader)
    while harness.evict(1):
        pass
    while harness.tree.prefixes.pressure.reclaim(None):
        pass
    (rest,) = (span for span in harness.tree.spans.values() if span.end == 4)
    assert rest.segment.num_slots == 4 and rest.runs()[0].lens.eq(4).all()
    harness.decode(reader)
    harness.finish(reader)
