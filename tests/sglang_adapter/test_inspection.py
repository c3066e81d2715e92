"""What a live tree counts and answers."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest
import torch

from helpers.documents import admitted
from helpers.event_sockets import ipc_config
from helpers.harness import DOCUMENT, WINDOWS, Harness
from helpers.watched import WatchedHarness
from sgl_kvevict.config import EventsConfig, KVEvictConfig
from sgl_kvevict.events.client import InspectClient, RequestFailedError
from sgl_kvevict.events.questions import Kept, KeptReport, Status, StatusReport, Tokens, TokensReport, Tree, TreeReport
from sgl_kvevict.events.service import Question
from sgl_kvevict.segments.segment import kept_share
from sgl_kvevict.sglang_adapter.factory import events_of_rank
from sgl_kvevict.sglang_adapter.monitoring.inspection import ANSWERING_SHARE, Inspection


@pytest.fixture
def watched(tmp_path):
    with WatchedHarness(ipc_config(tmp_path)) as watched:
        yield watched


@pytest.fixture
def harness(watched):
    return watched.harness


def ask(watched: WatchedHarness, request, answer):
    """Ask over the socket while the scheduler's loop turns."""

    async def run():
        async with InspectClient(watched.service.config.endpoint) as client:
            asked = asyncio.ensure_future(client.ask(request, answer))
            while not asked.done():
                watched.turn()
                await asyncio.sleep(0.001)
            return asked.result()

    return asyncio.run(run())


def totals(watched: WatchedHarness, *names: str) -> tuple[int, ...]:
    found = watched.harness.tree.prefixes.totals
    return tuple(getattr(found, name) for name in names)


COMPRESSED = ("compressions", "compressed_tokens", "released_slots", "kept_entries", "evicted_entries")
DROPPED = ("dropped_nodes", "dropped_spans", "dropped_slots")


def test_a_compression_is_counted_with_its_sizes(watched):
    watched.harness.finish(watched.harness.run(DOCUMENT))
    assert totals(watched, *COMPRESSED) == (1, 60, 42, 18 * 4, 60 * 4 - 18 * 4)
    assert totals(watched, "compression_seconds") > (0,)


def test_split_resize_drop_repack_and_flush_are_counted(harness, watched):
    harness.finish(harness.run(DOCUMENT))
    (node,) = harness.tree.spans
    harness.finish(harness.run(DOCUMENT[:10] + [9] * 3))
    assert totals(watched, "splits", "resizes", "repacks", *DROPPED) == (1, 0, 0, 0, 0, 0)
    while node in harness.tree.spans:
        harness.evict(1)
    assert totals(watched, "resizes", "resized_slots", "repacks", "dropped_spans") == (1, 12, 1, 1)
    assert totals(watched, "evicted_entries") == (60 * 4 - 18 * 4 + 48,)
    assert totals(watched, *DROPPED) == (2, 1, 3)  # a question, and a span: its slots are its segment's
    harness.flush()
    assert totals(watched, "clears") == (1,)


def test_what_could_not_be_done_is_counted_by_its_reason(harness, watched, tmp_path):
    first = admitted(harness, DOCUMENT, is_exact=True)
    harness.prefill(first, 30)
    harness.run([*DOCUMENT[:30], 8, 8])
    harness.prefill(first)
    assert totals(watched, "refused_in_use", "refused_not_cached") == (2, 0)

    folder = tmp_path / "unsplittable"
    folder.mkdir()
    unsplittable = Harness(num_slots=240, windows=WINDOWS)
    with WatchedHarness(ipc_config(folder), unsplittable) as other:
        other.harness.run(DOCUMENT)
        other.harness.run(DOCUMENT[:20] + [9] * 20)
        assert totals(other, "refused_in_use", "refused_not_cached") == (0, 1)


def test_each_prompt_of_a_request_is_counted_once_with_what_it_has_found(harness, watched):
    for prompt, found in ((DOCUMENT, 0), (DOCUMENT[:20] + [9] * 30, 20)):
        req = harness.request(prompt)
        req.cached_tokens = found  # as SGLang's scheduler counts them
        harness.admit(req)
        harness.prefill(req, 30)
        harness.prefill(req)
        harness.decode(req)
        harness.finish(req)
    assert totals(watched, "prompts", "prompt_tokens", "found_tokens") == (2, 110, 20)


def test_totals_of_traffic_add_up(watched):
    rng = random.Random(1)
    for _ in range(80):
        watched.one_request(rng)
    while watched.harness.evict(40):  # spans as well: they go last
        pass
    watched.one_request(rng)
    report = ask(watched, Status(), StatusReport)
    counted, gauges = report.totals, report.gauges
    assert counted.compressions > 10 and counted.splits > 0 and counted.resizes > 0 and counted.dropped_spans > 0
    assert counted.dropped_spans < counted.dropped_nodes
    live = gauges.entries_16 + gauges.entries_4
    assert gauges.spans > 0 and 0 < live <= counted.kept_entries + counted.returned_entries
    evicted_at_once = counted.compressed_tokens * 4 - counted.kept_entries
    assert counted.evicted_entries > evicted_at_once > 0  # the others went in resizes


def test_status_adds_up_and_sorts(harness, watched):
    readers = [harness.run([*DOCUMENT, i]) for i in range(3)]
    harness.finish(harness.run([9] * 20 + DOCUMENT[:10]))
    report = ask(watched, Status(sort="readers"), StatusReport)
    pool = report.gauges.pool
    assert pool.free + pool.compressed + pool.full + pool.private == pool.total == 240
    assert pool.compressed == report.gauges.span_slots == sum(row.slots for row in report.prefixes)
    assert report.gauges.logical_tokens == sum(len(node.key) for node in harness.tree.nodes())
    assert (report.gauges.shared_spans, report.gauges.max_readers_per_span) == (1, 3)
    assert [(row.tokens, row.slots, row.readers) for row in report.prefixes] == [(61, 19, 3), (30, 9, 0)]
    assert report.totals.compressions == 2
    assert [row.slots for row in ask(watched, Status(limit=1, sort="tokens"), StatusReport).prefixes] == [19]
    for req in readers:
        harness.finish(req)


def test_bytes_entries_and_bits_of_rows_of_few_bits(tmp_path):
    """What the tree, its nodes and its prefixes tell of rows of several widths adds up."""
    config = KVEvictConfig(budget=0.2, tail_tokens=4, sink_tokens=2, min_prefix_tokens=6)
    harness = Harness(num_slots=240, bits="auto", config=config)
    with WatchedHarness(ipc_config(tmp_path), harness) as watched:
        reader = harness.run([*DOCUMENT, 1])
        harness.finish(harness.run(DOCUMENT[:20] + [9] * 5))
        status, tree = ask(watched, Status(), StatusReport), ask(watched, Tree(), TreeReport)
        compressed = [node for node in tree.nodes if node.compressed]
        kept = [ask(watched, Kept(node.id), KeptReport) for node in compressed]
        harness.finish(reader)
    gauges, (segment,) = status.gauges, harness.tree.prefixes.table.packed
    counts = {16: 4 * segment.packed.num_sinks, segment.packed.rows.bits: segment.packed.rows.num_entries}
    assert counts == segment.entries_by_bits
    assert counts.keys() == {16, 4}
    (row,) = status.prefixes
    assert (row.entries, row.bytes, row.kept) == (
        counts,
        segment.num_slots * gauges.slot_bytes,
        sum(counts.values()) / (61 * 4),
    )
    assert (gauges.entries_16, gauges.entries_4) == (counts[16], counts[4])
    assert gauges.beside_bytes == 10 * sum(counts.values()) + harness.tree.packer.coding.num_bytes
    assert (gauges.span_bytes, gauges.share_of_bytes) == (row.bytes, row.slots / row.tokens)
    assert gauges.share_of_entries == row.kept < 1 and len(compressed) == 2
    for each in counts:
        assert sum(node.entries.get(each, 0) for node in compressed) == counts[each]
        assert sum(sum(report.entries.get(each, [])) for report in kept) == counts[each]
    for node, report in zip(compressed, kept, strict=True):
        assert node.bytes == node.slots * gauges.slot_bytes
        assert node.kept == sum(map(sum, report.entries.values())) / (node.tokens * 4)


def test_tree_has_every_node_and_its_slots_sum_to_what_is_held(harness, watched):
    harness.finish(harness.run(DOCUMENT))
    harness.finish(harness.run(DOCUMENT[:10] + [9] * 12))
    report = ask(watched, Tree(), TreeReport)
    nodes = {node.id: node for node in report.nodes}
    live = {node.id: node for node in harness.tree.nodes()}
    assert nodes.keys() == live.keys() and report.omitted == 0
    held = report.pool.compressed + report.pool.full
    assert sum(node.slots for node in report.nodes) == pytest.approx(held)
    for node in report.nodes:
        assert node.tokens == len(live[node.id].key) and node.namespace is None
        if node.parent:
            assert nodes[node.parent].start + nodes[node.parent].tokens == node.start
        span = harness.tree.spans.get(live[node.id])
        assert node.compressed == (span is not None)
        if span is not None:
            assert node.kept == pytest.approx(span.runs()[0].lens.sum().item() / (span.num_tokens * 4))
    assert report.nodes[0].parent == 0
    few = ask(watched, Tree(limit=2), TreeReport)
    assert [node.id for node in few.nodes] == [node.id for node in report.nodes][:2]
    assert few.omitted == len(report.nodes) - 2


def test_kept_map_is_the_kept_set(harness, watched):
    req = harness.run(DOCUMENT)
    (node, span), *_ = harness.tree.spans.items()
    report = ask(watched, Kept(node.id), KeptReport)
    share = np.frombuffer(report.share, np.uint8).reshape(report.num_rows, report.num_bins)
    assert (report.start, report.end, report.num_bins, report.num_rows) == (0, 60, 60, 4)
    indptr, positions = span.segment.packed.rows.indptr.tolist(), span.segment.packed.rows.positions.tolist()
    for row in range(4):
        assert np.flatnonzero(share[row]).tolist() == positions[indptr[row] : indptr[row + 1]]
    assert set(np.unique(share)) == {0, 255}
    coarse = ask(watched, Kept(node.id, bins=5), KeptReport)
    assert coarse.num_bins == 5 and len(coarse.share) == 20
    harness.finish(req)


def test_kept_map_of_a_view_in_the_middle_of_a_segment():
    harness = Harness()
    harness.finish(harness.run(DOCUMENT))
    harness.finish(harness.run(DOCUMENT[:30] + [9] * 3))
    harness.finish(harness.run(DOCUMENT[:13] + [9] * 3))
    span = next(span for span in harness.tree.spans.values() if span.start == 13)
    assert (span.end, span.segment.num_spans) == (30, 3)
    (runs,), exact = span.runs(), kept_share(span, 17)
    for row, (begin, length) in enumerate(zip(runs.starts.flatten(), runs.lens.flatten(), strict=True)):
        positions = span.segment.packed.rows.positions[begin : begin + length]
        assert torch.equal(exact[row].nonzero().flatten() + 13, positions.long())
    assert torch.allclose(kept_share(span, 1).flatten(), exact.mean(1))


def test_token_ids_need_the_explicit_flag(harness, watched, tmp_path):
    harness.finish(harness.run(DOCUMENT, extra_key="tenant"))
    node = next(iter(harness.tree.nodes()))
    with pytest.raises(RequestFailedError, match="expose_tokens=false"):
        ask(watched, Tokens(node.id), TokensReport)
    folder = tmp_path / "exposed"
    folder.mkdir()
    with WatchedHarness(ipc_config(folder, expose_tokens=True)) as exposed:
        exposed.harness.finish(exposed.harness.run(DOCUMENT, extra_key="tenant"))
        nodes = ask(exposed, Tree(), TreeReport).nodes
        assert {node.namespace for node in nodes} == {"tenant"}
        tokens = [ask(exposed, Tokens(node.id), TokensReport).token_ids for node in nodes]
        assert tokens == [DOCUMENT]


def test_nodes_that_are_gone_and_bugs_are_failures_not_crashes(watched, monkeypatch, caplog):
    for request in (Kept(10**9), Tokens(10**9), Kept(-1)):
        with pytest.raises(RequestFailedError):
            ask(watched, request, KeptReport)
    monkeypatch.setattr("sgl_kvevict.sglang_adapter.monitoring.inspection.tree_report", lambda *_, **__: 1 / 0)
    with pytest.raises(RequestFailedError, match="internal error"):
        ask(watched, Tree(), TreeReport)
    assert "ZeroDivisionError" in caplog.text
    assert ask(watched, Status(), StatusReport).gauges.spans == 0


def test_clients_that_never_stop_asking_take_a_bounded_part_of_the_schedulers_time(watched, monkeypatch):
    """Each answer takes a second here, and brings another question."""
    now, answered = [0.0], []
    question = Question([b"client"], Status())

    def answer(_question: Question, _reply: object) -> None:
        now[0] += 1
        answered.append(now[0])
        if len(answered) < 1000:
            watched.service._questions.append(question)

    monkeypatch.setattr(watched.service, "answer", answer)
    inspection = Inspection(watched.harness.tree, watched.service, 1.0, clock=lambda: now[0])
    watched.service._questions.extend([question] * 3)
    inspection.each_turn()
    assert answered == [1.0]  # the others wait for a later turn
    for _ in range(100):
        now[0] += 1  # a step
        inspection.each_turn()
    assert len(answered) / now[0] == pytest.approx(ANSWERING_SHARE, rel=0.1)
    watched.service._questions.clear()
    inspection.each_turn()
    now[0] += 60
    watched.service._questions.append(question)
    inspection.each_turn()
    assert answered[-1] == now[0]  # who asks now and then does not wait


@pytest.mark.parametrize("cut", [50, 53, 54, 55])
def test_dead_entries_are_those_that_no_span_reads(harness, watched, cut):
    harness.finish(harness.run(DOCUMENT))
    (lower,) = harness.tree.spans
    harness.run(DOCUMENT[:cut] + [9] * 3)
    assert ask(watched, Status(), StatusReport).gauges.dead_entries == 0
    while lower in harness.tree.spans:
        harness.evict(1)
    ((upper, span),) = harness.tree.spans.items()
    live = int(span.runs()[0].lens.sum())
    assert ask(watched, Status(), StatusReport).gauges.dead_entries == span.segment.num_entries - live < 4
    (row,) = [row for row in ask(watched, Tree(), TreeReport).nodes if row.id == upper.id]
    assert (row.slots, row.kept) == (span.segment.num_slots, live / (span.num_tokens * 4))


def test_ranks_get_addresses_of_their_own():
    for endpoint, of_third in (("tcp://127.0.0.1:7000", "tcp://127.0.0.1:7003"), ("ipc:///tmp/x", "ipc:///tmp/x_dp3")):
        config = EventsConfig(endpoint=endpoint)
        assert events_of_rank(config, 0) == config
        assert events_of_rank(config, 3).endpoint == of_third
