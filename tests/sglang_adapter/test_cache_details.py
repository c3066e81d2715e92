"""What clients are told of what their answers were read from, with SGLang's own accounting of the output."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from weakref import ref

import pytest
from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer

from helpers.documents import admitted
from helpers.harness import Harness
from sgl_kvevict.cache_report import CacheReport
from sgl_kvevict.sglang_adapter.operations import after_details

DOCUMENT = [(i * 3 + 3) % 11 for i in range(60)]
COMPRESSED = 60
"""Its tokens without the tail."""
RUNS = 4
ENTRIES = 18 * RUNS
"""Kept of them at the budget of 0.3, in as many slots."""


def details_of(tree, req) -> dict | None:
    """What SGLang would send with a part of the answer."""
    streamer = SimpleNamespace(tree_cache=tree, enable_hicache_storage=lambda: False)
    return after_details(SchedulerOutputStreamer.get_cached_tokens_details(streamer, req), streamer, req)


def told(harness: Harness, req) -> CacheReport:
    return CacheReport.of({"prompt_tokens": 1, "cached_tokens_details": details_of(harness.tree, req)})


def admit(harness: Harness, tokens: list[int], *, is_exact: bool = False):
    """A request that has found its prompt, counted as SGLang's batch does."""
    req = admitted(harness, tokens, is_exact=is_exact)
    req.cached_tokens = req.prefix_len
    return req


def ask(harness: Harness, tokens: list[int], *, is_exact: bool = False):
    req = admit(harness, tokens, is_exact=is_exact)
    assert harness.prefill(req)
    return req


def end(harness: Harness, req) -> CacheReport:
    harness.decode(req)
    harness.finish(req)
    return told(harness, req)


def test_nothing_is_told_before_a_prompt_is_prefilled(harness):
    req = harness.request(DOCUMENT)
    assert details_of(harness.tree, req) is None
    assert harness.admit(req) and details_of(harness.tree, req) is None


def test_what_was_found_uncompressed():
    harness = Harness(waits=True, num_slots=400)
    assert end(harness, ask(harness, DOCUMENT)) == CacheReport()
    again = ask(harness, [*DOCUMENT, 1, 1])
    assert details_of(harness.tree, again) == {"device": 60, "host": 0, "kvevict_compressed": 0}


def test_what_was_found_compressed(harness):
    harness.finish(ask(harness, DOCUMENT))
    req = ask(harness, [*DOCUMENT, 1, 1])
    assert details_of(harness.tree, req) == {
        "device": 60,
        "host": 0,
        "kvevict_compressed": COMPRESSED,
        "kvevict_percent_16_bits": 30,
        "kvevict_percent_4_bits": 0,
    }
    read = harness.tree.prefixes.readers[req].report.compressed
    assert read.share == pytest.approx(ENTRIES / (COMPRESSED * RUNS)) and read.bits == 16
    assert end(harness, req).compressed == told(harness, req).compressed


def test_rows_of_few_bits():
    harness = Harness(waits=True, bits="auto", num_slots=400)
    harness.finish(ask(harness, DOCUMENT))
    harness.evict(1)
    (segment,) = harness.tree.prefixes.table.packed
    req = ask(harness, [*DOCUMENT, 1, 1])
    sizes = {bits: count / (COMPRESSED * RUNS) for bits, count in segment.entries_by_bits.items()}
    assert len(sizes) > 1 and min(sizes) < 16
    assert told(harness, req).compressed.shares == pytest.approx([sizes.get(bits, 0) for bits in (16, 4)], abs=0.005)
    assert told(harness, req).compressed.bits < 16


def test_an_answer_is_told_the_least_that_it_has_read():
    """The first part of a stream what was read until then, the last part, or the whole answer, the least."""
    harness = Harness(waits=True, num_slots=400)
    harness.finish(ask(harness, DOCUMENT))
    req = ask(harness, [*DOCUMENT, 1, 1])
    assert told(harness, req) == CacheReport(device=60)
    harness.decode(req)
    harness.evict(1)
    (segment,) = harness.tree.prefixes.table.packed
    assert told(harness, req) == CacheReport(device=60)  # the next part of a stream
    report = end(harness, req)
    assert report.compressed.num_tokens == COMPRESSED and report.device == 60
    assert report.compressed.share == pytest.approx(segment.num_entries / (COMPRESSED * RUNS), abs=0.005)


def test_its_own_tokens_that_were_compressed_while_it_answered_count():
    harness = Harness(waits=True, num_slots=400)
    req = ask(harness, DOCUMENT)
    harness.evict(1)
    report = end(harness, req)
    assert (report.device, report.compressed.num_tokens) == (0, COMPRESSED) and report.compressed.share < 1


def test_a_first_token_that_is_the_last_was_computed_before_the_prompt_was_compressed(harness):
    req = admit(harness, DOCUMENT)
    req.sampling_params.max_new_tokens = 1
    assert harness.prefill(req) and len(harness.tree.spans) == 1
    assert told(harness, req) == CacheReport()


def test_a_prompt_that_leaves_a_segment_is_told_the_mean_of_all_its_tokens(harness):
    harness.finish(ask(harness, DOCUMENT))
    read = told(harness, ask(harness, [*DOCUMENT[:20], 9, 9])).compressed
    assert read.num_tokens == 20 and read.share == pytest.approx(ENTRIES / (COMPRESSED * RUNS), abs=0.005)


def test_an_exact_request_is_told_what_it_cost():
    harness = Harness(num_slots=400)
    assert end(harness, ask(harness, DOCUMENT, is_exact=True)).computed_again == 0
    harness.flush()
    harness.finish(ask(harness, DOCUMENT))
    req = admit(harness, [*DOCUMENT, 1, 1], is_exact=True)
    assert details_of(harness.tree, req) is None  # an abort in the queue has computed nothing
    assert harness.prefill(req)
    wanted = {"device": 0, "host": 0, "kvevict_compressed": 0, "kvevict_computed_again": 60}
    assert details_of(harness.tree, req) == wanted
    harness.decode(req)
    harness.finish(req)
    assert details_of(harness.tree, req) == wanted


def test_an_exact_request_that_finds_its_prefix_uncompressed_has_cost_nothing():
    harness = Harness(waits=True, num_slots=400)
    harness.finish(ask(harness, DOCUMENT))
    assert end(harness, ask(harness, [*DOCUMENT, 1, 1], is_exact=True)) == CacheReport(device=60)


@pytest.mark.parametrize("way", ["retract", "abort"])
def test_what_was_read_before_an_end_counts(harness, way):
    harness.finish(ask(harness, DOCUMENT))
    req = ask(harness, [*DOCUMENT, 1, 1])
    before = told(harness, req)
    getattr(harness, way)(req)
    assert told(harness, req) == before and before.compressed.num_tokens == COMPRESSED
    if way == "retract":
        harness.flush()
        assert harness.admit(req) and req.prefix_len == 0 and harness.prefill(req)
        assert end(harness, req).compressed.lost_bits >= before.compressed.lost_bits


def test_what_came_from_the_hosts_memory_is_compressed():
    harness = Harness(host_blocks=60)
    harness.finish(ask(harness, DOCUMENT))
    while harness.evict(1):
        pass
    report = told(harness, ask(harness, [*DOCUMENT, 1, 1]))
    assert (report.device, report.host, report.compressed.num_tokens) == (0, COMPRESSED, COMPRESSED)


def test_a_request_of_which_nothing_is_cached_is_told_when_it_ends(harness):
    harness.finish(ask(harness, DOCUMENT))
    req = harness.uncached_request([*DOCUMENT, 1, 1])
    assert harness.admit(req) and harness.prefill(req)
    req.cached_tokens = req.prefix_len
    assert end(harness, req).compressed.num_tokens == COMPRESSED


def test_policy_none_and_other_caches_say_what_sglang_says():
    harness = Harness(policy=None)
    harness.finish(ask(harness, DOCUMENT))
    req = ask(harness, [*DOCUMENT, 1, 1])
    assert details_of(harness.tree, req) == {"device": 60, "host": 0}
    assert details_of(SimpleNamespace(), req) == {"device": 60, "host": 0}


def test_what_is_noted_ends_with_the_request(harness):
    req = ask(harness, DOCUMENT)
    harness.finish(req)
    record = ref(harness.tree.prefixes.readers[req])
    assert record() is not None and record().report is not None
    del req
    gc.collect()
    assert record() is None
