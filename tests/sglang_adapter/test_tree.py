"""The compressed tree on SGLang's real pools and requests, scenario by scenario."""

from __future__ import annotations

import pytest
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from helpers.documents import admitted, ranges, reading
from helpers.harness import DOCUMENT, WINDOWS, Harness
from sgl_kvevict.config import KVEvictConfig
from sgl_kvevict.sglang_adapter.monitoring.server_info import cache_state
from sgl_kvevict.sglang_adapter.span_component import FULL


def test_prompt_is_compressed_and_takes_exactly_its_budget(harness):
    req = harness.run(DOCUMENT)
    assert ranges(harness) == [(0, 60)]
    assert cache_state(harness.tree)["span_slots"] == 18  # 0.3 * 60
    assert harness.tree.protected_size() == 6  # what it can be shrunk into
    harness.decode(req)
    harness.finish(req)
    assert harness.tree.evictable_size() == harness.num_slots - harness.allocator.available_size()


@pytest.mark.parametrize("windows", [(), WINDOWS])
def test_first_position_after_a_compressed_prefix_is_logical(windows):
    """Also after one that cannot be split, which is shared whole."""
    harness = Harness(num_slots=240, windows=windows)
    harness.finish(harness.run(DOCUMENT))
    assert admitted(harness, [*DOCUMENT, 3]).prefix_len == 60


def test_divergence_inside_a_span_splits_it_without_copying(harness):
    harness.finish(harness.run(DOCUMENT))
    other = harness.run(DOCUMENT[:2] + [9] * 30)
    assert ranges(harness) == [(0, 2), (2, 32), (2, 60)]
    assert cache_state(harness.tree)["segments"] == 2
    harness.finish(other)
    again = harness.run([*DOCUMENT, 4])
    assert again is not None
    harness.finish(again)


def test_range_read_by_others_is_compressed_when_the_last_lets_go():
    harness = Harness(num_slots=240)
    twins = [harness.request([*DOCUMENT, i]) for i in range(3)]
    for req in twins:
        harness.admit(req)
    for req in twins[:-1]:
        harness.prefill(req, 30)
    for req in twins:
        harness.prefill(req)
    # All three matched nothing and prefilled on their own; the first to complete compressed its range alone, or had
    # to wait for those that already locked the shared part.
    for req in twins:
        harness.decode(req)
    for req in twins:
        harness.finish(req)
    assert cache_state(harness.tree)["pending_ranges"] == 0
    assert ranges(harness)[0][0] == 0 and max(end for _, end in ranges(harness)) >= 56


def test_a_request_in_the_middle_of_its_prefill_moves_along():
    harness = Harness(num_slots=240)
    first = harness.request(DOCUMENT)
    harness.admit(first)
    harness.prefill(first, 30)
    second = harness.run([*DOCUMENT[:30], 8, 8])  # reads the 30 tokens that the first has inserted so far
    assert ranges(harness) == [(0, 30), (30, 32)]
    harness.prefill(first)
    assert ranges(harness) == [(0, 30), (30, 32), (30, 60)]
    assert cache_state(harness.tree) | {"segments": 2, "pending_ranges": 0} == cache_state(harness.tree)
    for req in (first, second):
        harness.decode(req)
        harness.finish(req)


def test_a_request_that_was_admitted_but_not_begun_moves_along():
    harness = Harness(num_slots=240)
    harness.finish(harness.run([*DOCUMENT, 1, 2]))
    harness.tree.forget_compressed()
    exact = reading(harness, DOCUMENT)
    waiting = harness.request([*DOCUMENT, 3])
    harness.admit(waiting)
    assert ranges(harness) == [] and waiting.prefix_len == 60
    harness.finish(exact)
    assert ranges(harness) == [(0, 60)]
    harness.prefill(waiting)
    harness.decode(waiting)


def test_a_request_that_reads_exactly_finds_and_leaves_nothing_compressed():
    harness = Harness(num_slots=400)
    harness.finish(harness.run(DOCUMENT))
    nodes = len(list(harness.tree.nodes()))
    exact = admitted(harness, [*DOCUMENT, 1, 2, 3], is_exact=True)
    assert exact.prefix_len == 0
    harness.prefill(exact, 20)
    harness.prefill(exact)
    harness.decode(exact)  # the harness checks that it reads no span
    assert len(list(harness.tree.nodes())) == nodes
    harness.finish(exact)
    assert len(list(harness.tree.nodes())) == nodes and ranges(harness) == [(0, 60)]


def test_a_request_that_reads_exactly_shares_what_is_uncompressed():
    harness = Harness(num_slots=400)
    exact = reading(harness, DOCUMENT)
    other = admitted(harness, [*DOCUMENT, 1], is_exact=True)
    assert other.prefix_len == 60 and harness.prefill(other)
    harness.finish(exact)
    assert ranges(harness) == []
    harness.decode(other)
    harness.finish(other)
    assert ranges(harness) == [(0, 60)]


def test_chunked_prefill_compresses_once_at_the_end(harness):
    req = harness.run(DOCUMENT, chunk=13)
    assert harness.tree.prefixes.totals.compressions == 1
    assert min(harness.tree.spans.values(), key=lambda span: span.start).is_owner
    harness.decode(req)


def test_next_turn_compresses_the_answer_of_the_last(harness):
    first = harness.run(DOCUMENT)
    for _ in range(5):
        harness.decode(first)
    answer = list(first.output_ids)
    harness.finish(first)
    second = harness.run(DOCUMENT + answer[:-1] + [9] * 10)
    assert max(end for _, end in ranges(harness)) == 60 + 5 + 10
    harness.decode(second)


def test_budget_one_keeps_everything():
    harness = Harness(config=KVEvictConfig(budget=1.0, tail_tokens=4, sink_tokens=2, min_prefix_tokens=6))
    req = harness.run(DOCUMENT)
    assert cache_state(harness.tree)["span_slots"] == 60
    (path,) = harness.tree.read_paths([req])
    assert path[0].lens.eq(60).all()


class TestUnsplittable:
    @pytest.fixture
    def harness(self):
        return Harness(num_slots=240, windows=WINDOWS)

    def test_match_stops_before_a_divergence(self, harness):
        harness.finish(harness.run(DOCUMENT))
        key = RadixKey(harness.request(DOCUMENT[:20]).origin_input_ids)
        assert harness.tree.match_prefix(MatchPrefixParams(key=key)).device_prefix_len == 0
        assert ranges(harness) == [(0, 56)]

    def test_unread_span_gives_way(self, harness):
        harness.finish(harness.run(DOCUMENT))
        req = harness.run(DOCUMENT[:20] + [9] * 20)
        assert ranges(harness) == [(0, 36)]
        assert harness.tree.components[FULL]._order._levels == [0.0]  # slots were not short: nothing else is worth less
        harness.finish(req)

    def test_prompt_is_not_cached_while_the_span_is_read(self, harness):
        reader = harness.run(DOCUMENT)
        req = harness.run(DOCUMENT[:20] + [9] * 20)
        assert ranges(harness) == [(0, 56)] and req.kv.cache_protected_len == 0
        harness.decode(req)
        harness.finish(req)
        harness.finish(reader)
        assert ranges(harness) == [(0, 56)]

    def test_who_reads_the_beginning_goes_on_reading_all_of_it(self):
        """A request generates behind a prompt that another one goes on from: its part is a segment of its own."""
        config = KVEvictConfig(budget=0.3, tail_tokens=4, min_prefix_tokens=50)
        harness = Harness(num_slots=240, config=config, windows=WINDOWS)
        reader = harness.run(DOCUMENT[:20])
        harness.finish(harness.run(DOCUMENT))
        assert ranges(harness) == [(0, 20), (20, 56)]
        owned = {span.segment for span in harness.tree.spans.values()}
        assert sorted((segment.start, segment.end) for segment in owned) == [(0, 20), (20, 56)]
        harness.decode(reader)
        harness.finish(reader)
        harness.check()
