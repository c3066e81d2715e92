"""Evicted entries lie in the host's memory, and come back: contents, sizes, both memories conserved."""

from __future__ import annotations

import pytest
import torch

from helpers.harness import Harness
from sgl_kvevict.config import KVEvictConfig
from sgl_kvevict.errors import InvariantError
from sgl_kvevict.guard import Place
from sgl_kvevict.segments.segment import View, entries_by_head
from sgl_kvevict.segments.sources import Source
from sgl_kvevict.sglang_adapter.monitoring.inspection import tree_report

TEXT = [i * 7 % 11 for i in range(60)]
CONFIG = KVEvictConfig(budget=0.3, min_budget=0.1, tail_tokens=4, sink_tokens=2, min_prefix_tokens=6)


def harness_of(**options) -> Harness:
    given = {"num_slots": 240, "host_blocks": 200, "config": CONFIG, "waits": True}
    return Harness(**given | options)


def serve(harness: Harness, tokens: list[int], **options) -> int:
    """Run a request to its end; the harness checks every entry that it reads. Returns what it found."""
    req = harness.request(tokens, options=options or None)
    harness.tree.prefixes.readers[req].least_share = harness.tree._options_of(req).least_share
    assert harness.admit(req)
    found = req.prefix_len
    assert harness.prefill(req)
    harness.decode(req)
    if req in harness.live:
        harness.finish(req)
    return found


def shrunk(harness: Harness, *shares: float):
    """The segment of a text of 60 tokens, packed at one share after the other."""
    serve(harness, TEXT)
    prefixes, (first, *others) = harness.tree.prefixes, shares
    segment = packed(harness, TEXT[:60], first)
    for share in others:
        prefixes.resizer.resize(segment, prefixes.resizer.slots_at(segment, share))
        harness.check()
    return segment


def packed(harness: Harness, tokens: list[int], share: float):
    """The last segment of a text that the tree has, of what was uncompressed of it."""
    prefixes = harness.tree.prefixes
    path = prefixes._tree.find(tokens, (None, None))
    prefixes.resizer.compress(path[-1], len(tokens), share=share)
    harness.check()
    return prefixes.spans.get(prefixes._tree.find(tokens, (None, None))[-1]).segment


def num_entries(segment) -> int:
    return segment.num_tokens * segment.geometry.num_runs


def kept_entries(segment) -> int:
    return sum(part.num_entries for part in segment.evicted if part.blocks)


@pytest.mark.parametrize("bits", [16, "auto"])
def test_what_a_segment_has_lost_comes_back_step_by_step(bits):
    harness = harness_of(bits=bits)
    segment, sizes = shrunk(harness, 0.2), []
    prefixes = harness.tree.prefixes
    for share in (0.15, 0.1):
        sizes.append(segment.num_entries)
        prefixes.resizer.resize(segment, prefixes.resizer.slots_at(segment, share))
        harness.check()
    before = segment.num_entries
    assert before + kept_entries(segment) == num_entries(segment)
    reader = harness.run([*TEXT[:60], 3, 3])  # it reads on while the segment grows
    for wanted in [*reversed(sizes), num_entries(segment)]:
        free, slots = harness.allocator.available_size(), segment.num_slots
        assert prefixes.growth.grow(segment)
        assert segment.num_entries == wanted and free - harness.allocator.available_size() == segment.num_slots - slots
        harness.check()
        assert harness.decode(reader)
    assert not segment.evicted
    totals = prefixes.totals
    assert totals.growths == 3
    assert totals.returned_entries == totals.evicted_entries == num_entries(segment) - before
    prefixes.resizer.resize(segment, prefixes.resizer.slots_at(segment, 0.1))  # and go again
    harness.check()
    assert segment.num_entries + kept_entries(segment) == num_entries(segment)
    assert harness.decode(reader) and not any(harness.tree.guard.errors.values())


@pytest.mark.parametrize(("options", "least"), [({"share": 0.3}, 0.3), ({"share": 1}, 1.0), ({"complete": True}, 1.0)])
@pytest.mark.parametrize("is_dropped", [False, True])
def test_a_request_asks_for_entries(options, least, is_dropped):
    harness = harness_of(bits="auto")
    segment = shrunk(harness, 0.15, 0.05)
    before = segment.num_entries
    if is_dropped:
        harness.drop_all()
        assert len(harness.tree.spans) == 0
    assert serve(harness, [*TEXT[:60], 5, 5], **options) == 60
    (segment,) = harness.tree.prefixes.table.packed
    assert segment.num_entries >= least * num_entries(segment) and segment.num_entries > before
    assert (segment.num_entries == num_entries(segment)) is (least == 1.0)


def test_a_hint_that_cannot_be_had_is_answered_with_what_is_there():
    harness = harness_of(host_blocks=0)
    segment = shrunk(harness, 0.3)
    size = segment.num_entries
    assert serve(harness, [*TEXT[:60], 5, 5], complete=True) == 60 and segment.num_entries == size
    harness = harness_of()
    segment = shrunk(harness, 0.3)
    size = segment.num_entries
    harness.tree.port.alloc = lambda num_slots: None
    assert serve(harness, [*TEXT[:60], 5, 5], complete=True) == 60 and segment.num_entries == size


def test_an_own_prompt_of_a_request_that_asks_is_not_compressed_at_once():
    for options, is_packed in (({}, True), ({"complete": True}, False)):
        harness = harness_of(waits=False, scores_any_range=True)
        serve(harness, TEXT, **options)
        assert bool(harness.tree.prefixes.table.packed) is is_packed


@pytest.mark.parametrize("bits", [16, "auto"])
def test_what_is_dropped_comes_back_complete(bits):
    """Uncompressed, packed, and grown again; the host's copy and what was evicted are one prefix."""
    harness = harness_of(bits=bits)
    serve(harness, TEXT)
    for _ in range(3):
        harness.drop_all()
        assert len(harness.tree.spans) == 0 and len(harness.host) == 1
        assert serve(harness, [*TEXT[:60], 5, 5]) == 60
        (segment,) = harness.tree.prefixes.table.packed
        assert segment.num_entries + kept_entries(segment) == num_entries(segment)
        while harness.tree.prefixes.growth.next_of(segment) is not None:
            assert harness.tree.prefixes.growth.grow(segment)
        harness.check()


@pytest.mark.parametrize(("shared", "ranges"), [(40, [(40, 60)]), (4, [(0, 4), (4, 24)])])
def test_a_copy_has_what_was_evicted_from_every_segment_of_its_path(shared, ranges):
    """The path leaves its first segment in the middle: early, both become one segment of the host's memory."""
    harness = harness_of(bits="auto", num_slots=400)
    shrunk(harness, 0.15)
    prefixes = harness.tree.prefixes
    branch = [*TEXT[:shared], *[9] * 20]
    serve(harness, branch)
    packed(harness, branch, 0.15)
    serve(harness, [*TEXT[:60], 5, 5])  # so that the branch goes first
    harness.drop_all()
    copies = {tuple(copy.record.tokens.tolist()): copy for copy in harness.host._segments.values()}
    assert [(part.start, part.end) for part in copies[tuple(branch)].record.parts] == ranges
    for text in (branch, TEXT[:60]):
        assert serve(harness, [*text, 5, 5], complete=True) == len(text)
        read = prefixes.spans.compressed_read(prefixes._tree.find(text, (None, None)), len(text))
        assert read.share == pytest.approx(1.0)
    assert not any(harness.tree.guard.errors.values())


def test_a_copy_of_a_segment_that_has_grown_and_of_another_one_is_in_order_of_positions():
    """The first one has rows of 4 bits, the other of 16, of which the copy has 4."""
    harness = harness_of(bits="auto", num_slots=400)
    first = shrunk(harness, 0.15)
    prefixes = harness.tree.prefixes
    serve(harness, [*TEXT[:60], *[9] * 20])
    second = packed(harness, [*TEXT[:60], *[9] * 20], 1)
    assert prefixes.growth.grow(first)
    sources = [Source(first.geometry, View(each, each.start, each.end)) for each in (first, second)]
    assert [source.bits for source in sources] == [4, 16]
    copied = harness.tree.packer.copy(sources)
    rows = copied.rows
    assert (
        rows.bits == 4
        and rows.num_entries == first.num_entries + second.num_entries - copied.num_sinks * first.geometry.num_runs
    )
    runs = rows.positions.split(rows.keep_lens.flatten().tolist())
    assert all(torch.equal(run, run.sort().values) for run in runs)


@pytest.mark.parametrize("is_for_growth", [False, True])
def test_what_was_cut_off_does_not_come_back(is_for_growth):
    """Nor does what is cut off to make room for what comes back."""
    harness = harness_of()
    segment, prefixes = shrunk(harness, 0.3), harness.tree.prefixes
    harness.finish(harness.run([*TEXT[:30], 9, 9]))  # splits the node
    assert segment.num_spans == 2
    if is_for_growth:
        held = harness._alloc(harness.allocator.available_size() - 35)  # it needs 42
        with prefixes._tree.holding(prefixes._tree.find(TEXT[:30], (None, None))):
            assert not prefixes.growth.grow(segment) and segment.end == 30
        harness.allocator.free(held)
    while segment.end == 60:
        assert harness.evict(1)
    assert len(segment.evicted) == 1 and segment in prefixes.table.packed
    assert prefixes.growth.grow(segment)
    assert segment.num_live_entries == num_entries(segment) == 30 * harness.geometry.num_runs
    harness.check()
    assert serve(harness, [*TEXT[:60], 5, 5], complete=True) == 60  # the other half comes back with the host's copy
    assert prefixes.spans.compressed_read(prefixes._tree.find(TEXT[:60], (None, None)), 60).share == 1.0


def test_a_full_host_loses_what_was_evicted_first():
    """What was written longest ago goes first; it never pushes out a segment that the pool does not have."""
    harness = harness_of()
    whole = shrunk(harness, 0.3, 0.2, 0.1).evicted
    harness = harness_of(host_blocks=sum(len(part.blocks) for part in whole) - 1)
    segment = shrunk(harness, 0.3, 0.2, 0.1)
    assert [bool(part.blocks) for part in segment.evicted] == [False, True, True]
    size = segment.num_entries + kept_entries(segment)
    while harness.tree.prefixes.growth.next_of(segment) is not None:
        assert harness.tree.prefixes.growth.grow(segment)
        harness.check()
    assert segment.num_entries == size < num_entries(segment)
    harness = harness_of(host_blocks=14)
    shrunk(harness, 0.1)
    harness.drop_all()
    assert len(harness.host) == 1 and not harness.host.evicted
    serve(harness, [9, *TEXT])
    packed(harness, [9, *TEXT[:59]], 0.1)
    assert len(harness.host) == 1


def test_a_request_that_asks_gets_every_part_however_many_there_are():
    """Prompts that shrink while they are prefilled have a part for each of their chunks; all are read as one span."""
    harness = harness_of(bits="auto")
    segment = shrunk(harness, *(num_slots / 60 for num_slots in range(15, 2, -1)))
    prefixes = harness.tree.prefixes
    assert sum(bool(part.blocks) for part in segment.evicted) > 6
    assert serve(harness, [*TEXT[:60], 5, 5], complete=True) == 60
    assert segment.num_live_entries == num_entries(segment) and not segment.evicted
    (span,) = (span for _, span in harness.tree.spans.items())
    assert [(runs.num_tokens, runs.bits) for runs in span.runs()] == [(2, 16), (58, 4)]
    prefixes.resizer.resize(segment, prefixes.resizer.slots_at(segment, 0.1))
    harness.check()
    assert prefixes.growth.grow(segment) and segment.num_live_entries == num_entries(segment)


@pytest.mark.parametrize("fault", ["put_evicted", "get_evicted"])
def test_an_error_of_the_hosts_copy_is_that_prefixs(monkeypatch, fault):
    harness = harness_of()
    other = shrunk(harness, 0.3) if fault == "get_evicted" else None
    monkeypatch.setattr(type(harness.host), fault, lambda *args: 1 / 0)
    segment = other or shrunk(harness, 0.3)
    size, free = segment.num_entries, harness.allocator.available_size()
    assert serve(harness, [*TEXT[:60], 5, 5], complete=True) == 60
    monkeypatch.undo()
    assert segment.num_entries == size and harness.tree.prefixes.growth.next_of(segment) is None
    assert sum(harness.tree.guard.errors.values()) == 1 and harness.allocator.available_size() <= free
    harness.check()


@pytest.mark.parametrize("is_dropped", [False, True])
def test_without_memory_of_the_device_entries_come_back_later(monkeypatch, is_dropped):
    harness = harness_of(bits="auto")
    segment, prefixes = shrunk(harness, 0.15), harness.tree.prefixes
    if is_dropped:
        harness.drop_all()
    size, free = segment.num_entries, harness.allocator.available_size()
    monkeypatch.setattr(prefixes.compressor.packer, "_placed", lambda *args: [].pop())
    req = harness.request([*TEXT[:60], 5, 5])
    prefixes.readers[req].least_share = 1.0
    assert harness.admit(req) and req.prefix_len == 60 * (not is_dropped)
    harness._cancel(req)
    now = segment.num_entries, harness.allocator.available_size(), prefixes._guard.errors[Place.HOST]
    assert now == (size, free, 1)
    monkeypatch.undo()
    assert serve(harness, [*TEXT[:60], 5, 5], complete=True) == 60
    assert [each.num_entries == num_entries(each) for each in prefixes.table.packed] == [True]
    harness.drop_all()
    monkeypatch.setattr(prefixes.compressor.packer, "_placed", lambda *args: [].pop())
    prefixes._guard.num_ranks = 2  # the other rank would go on with another tree
    with pytest.raises(InvariantError, match="one rank's host failed"):
        harness.admit(harness.request([*TEXT[:60], 5, 5]))


@pytest.mark.parametrize("empty", [Harness.flush, lambda harness: harness.tree.forget_compressed()])
def test_a_flush_or_new_weights_forget_what_was_evicted(empty):
    harness = harness_of()
    shrunk(harness, 0.3)
    empty(harness)
    harness.check()
    assert harness.host.used_bytes == 0


def test_reports_count_the_entries_of_every_part_that_came_back() -> None:
    """Of both halves of a segment that is split later."""
    harness = harness_of()
    segment = shrunk(harness, 0.5, 0.3, 0.1)
    serve(harness, [*TEXT, 5, 5], complete=True)
    serve(harness, TEXT[:30] + [10] * 12)
    assert segment.num_spans == 2 and segment.num_live_entries == num_entries(segment)
    report = tree_report(harness.tree, 100, expose_tokens=False)
    compressed = [node for node in report.nodes if node.compressed]
    assert sum(sum(node.entries.values()) for node in compressed) == num_entries(segment)
    assert [node.kept for node in compressed] == [1, 1]
    for span in (harness.tree.spans[each] for each in harness.tree.nodes() if each in harness.tree.spans):
        counts = entries_by_head(span)
        assert sum(int(each.sum()) for each in counts.values()) == span.num_tokens * segment.geometry.num_runs


@pytest.mark.parametrize("share", [0.1, 0.3])
@pytest.mark.parametrize("num_free", [0, 12, 20])
def test_a_request_that_asks_loses_nothing_of_its_own_path(num_free, share):
    """A path of two segments, of which the second may shrink further, and no other prefix that could make room."""
    harness = harness_of(bits="auto", num_slots=400)
    shrunk(harness, 0.3, 0.1)
    prefixes = harness.tree.prefixes
    text = [*TEXT[:60], *[9] * 60]
    serve(harness, text)
    second = packed(harness, text[:120], 0.3)
    num_slots = min(prefixes.resizer.slots_at(second, share), second.num_slots)
    if num_slots < second.num_slots:
        prefixes.resizer.resize(second, num_slots)
    harness._alloc(harness.allocator.available_size() - num_free)
    req = harness.request([*text[:120], 5, 5], options={"complete": True})
    prefixes.readers[req].least_share = 1.0
    assert harness.admit(req)
    assert req.prefix_len == 120 and len(prefixes.table.packed) == 2 and second.num_slots >= num_slots
    assert (prefixes.totals.growths > 0) is (num_free > 0)
    assert not any(harness.tree.guard.errors.values())


def test_what_fills_its_own_path_shrinks_for_a_request_that_asks():
    """Uncompressed tokens of the path take fewer slots, and lose nothing, so that its beginning can be complete."""
    harness = harness_of(bits="auto", num_slots=400)
    first = shrunk(harness, 0.3, 0.1)
    prefixes = harness.tree.prefixes
    text = [*TEXT[:60], *[9] * 60]
    serve(harness, text)
    harness._alloc(harness.allocator.available_size())
    req = harness.request([*text[:120], 5, 5], options={"complete": True})
    prefixes.readers[req].least_share = 1.0
    assert harness.admit(req) and req.prefix_len == 120
    assert prefixes.spans.compressed_read(prefixes._tree.find(text[:120], (None, None)), 120).share == 1.0
    assert first.num_live_entries == num_entries(first)


def test_who_waits_gets_its_entries_once_there_is_room():
    """A request that asks is tried when the pool is full, and again when somebody has left."""
    harness = harness_of(bits="auto")
    segment = shrunk(harness, 0.3, 0.1)
    running = harness.uncached_request([10] * harness.allocator.available_size())
    assert harness.admit(running) and harness.prefill(running) and harness.allocator.available_size() == 0
    req = harness.request([*TEXT[:60], 5, 5], options={"complete": True})
    harness.tree.prefixes.readers[req].least_share = 1.0
    size = segment.num_entries
    assert harness.admit(req) and segment.num_entries == size
    harness._cancel(req)  # it was not admitted
    harness.finish(running)
    assert harness.admit(req) and segment.num_entries == num_entries(segment)
    assert harness.prefill(req) and harness.tree.prefixes.readers[req].report.compressed.share == 1.0


def test_what_was_loaded_of_a_path_is_not_dropped_for_the_rest_of_it():
    """Two segments of one path are in the host's memory; the pool has room for the first one alone."""
    harness = harness_of(num_slots=400)
    shrunk(harness, 0.3)
    text = [*TEXT[:60], *[9] * 60]
    serve(harness, text)
    packed(harness, text[:120], 0.3)
    harness.drop_all()
    assert len(harness.tree.spans) == 0 and len(harness.host) == 2
    harness._alloc(harness.allocator.available_size() - 20)
    req = harness.request([*text[:120], 5, 5])
    assert harness.admit(req) and req.prefix_len == 60
