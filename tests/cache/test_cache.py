"""The life of a prefix, decided without SGLang."""

from __future__ import annotations

import subprocess
import sys

import pytest

from helpers.fake_tree import CONFIG, FakePasses, FakeTree
from helpers.pseudo_random_policy import PseudoRandomPolicy
from sgl_kvevict.cache.listener import CacheListener
from sgl_kvevict.cache.nodes import path_to
from sgl_kvevict.cache.readers import Released
from sgl_kvevict.cache.resize import Resizer
from sgl_kvevict.events.types import Cleared, Compressed, Dropped, Refused, Repacked
from sgl_kvevict.guard import Place
from sgl_kvevict.request import ticket_digest
from sgl_kvevict.segments import CacheObservation, Compressor

TICKET = "a-random-text-of-the-asker"


class LargePrompt(CacheObservation):
    """Takes more memory than there is."""

    num_bytes = 1


class Recorder(CacheListener):
    """Remembers its events."""

    def __init__(self) -> None:
        super().__init__()
        self.emitted: list[tuple] = []

    def emit(self, event):
        match event:
            case Compressed():
                self.emitted.append(("compressed", event.start, event.end - event.start, len(event.nodes)))
            case Refused():
                self.emitted.append(("refused", event.reason, event.tokens))
            case Repacked():
                self.emitted.append(("repacked", event.released_slots))
            case Dropped():
                self.emitted.append(("dropped", event.tokens, event.compressed, event.slots))
            case Cleared():
                self.emitted.append(("cleared",))


def cache(*, needs_passes=False, splittable=True, **fields) -> tuple[FakeTree, Recorder]:
    policy = PseudoRandomPolicy(needs_passes=needs_passes, splittable=splittable)
    tree = FakeTree(policy, CONFIG.model_copy(update=fields))
    tree.prefixes.listener = recorder = Recorder()
    return tree, recorder


def spans(tree):
    return sorted((span.start, span.end) for span in tree.prefixes.spans.values())


def test_this_package_needs_no_sglang():
    code = "import sys, sgl_kvevict.cache; print(any(name.split('.')[0] == 'sglang' for name in sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


def test_a_prompt_is_compressed_up_to_its_tail():
    tree, recorder = cache()
    node = tree.add(20)
    reader = tree.prompt(node)
    assert spans(tree) == [(0, 18)] and recorder.emitted == [("compressed", 0, 18, 1)] and tree.cuts == [18]
    assert node.parent.charged == 9 and len(tree.free_slots) == 9
    assert reader.row[:18].eq(0).all() and reader.row[18:20].ne(0).all()


def test_several_nodes_become_one_segment():
    tree, recorder = cache()
    last = tree.add(9, tree.add(6, tree.add(5)))
    tree.prompt(last)
    assert spans(tree) == [(0, 5), (5, 11), (11, 18)] and recorder.emitted == [("compressed", 0, 18, 3)]
    assert len({span.segment for span in tree.prefixes.spans.values()}) == 1


def test_what_cannot_be_split_becomes_one_segment_between_branches():
    tree, recorder = cache(splittable=False)
    first = tree.add(5)
    second = tree.add(6, first)
    tree.add(3, second)
    tree.prompt(tree.add(10, tree.add(4, second)))
    assert [told[1:] for told in recorder.emitted] == [(0, 11, 2), (11, 12, 2)]
    assert tree.prefixes.spans.blocks(first) and not tree.prefixes.spans.blocks(second)
    assert tree.prefixes.spans.owner_of(second) is first


def test_the_rest_of_what_cannot_be_split_is_worth_nothing():
    tree, recorder = cache(splittable=False)
    first = tree.add(8)
    second = tree.add(8, first)
    reader = tree.prompt(second)
    tree.release(reader)
    (upper,) = first.children.values()
    tree.drop(second)
    assert tree.drop(upper) == 0 and recorder.emitted[-1] == ("dropped", 6, True, 0)
    assert tree.prefixes.spans[first].segment.tokens_per_slot == float("-inf") and tree.prefixes.spans.blocks(first)
    assert tree.drop(first) == 7 and not tree.prefixes.spans
    assert sorted(tree.free_slots) == list(range(1, 17))


def test_a_checkpoint_may_stop_short_of_the_prompt():
    tree, _ = cache()
    node = tree.add(20)
    reader = tree.reader(node)
    tree.observe(reader, tree.root, 0, 27)
    tree.complete(reader, node)
    assert spans(tree) == [(0, 18)]


def test_all_who_read_a_range_move_along():
    tree, recorder = cache()
    node = tree.add(20)
    others = [tree.reader(node) for _ in range(2)]
    branch = tree.add(6, node)
    below = tree.reader(branch)
    reader = tree.prompt(node)
    assert spans(tree) == [(0, 18)] and recorder.emitted == [("compressed", 0, 18, 1)]
    for each in (*others, below, reader):
        assert each.row[:18].eq(0).all() and each.row[18:20].ne(0).all()
    assert below.row[20:26].ne(0).all()


def test_a_reader_of_the_upper_part_moves_along_up_to_where_it_reads():
    tree, _ = cache()
    upper = tree.add(8)
    above = tree.reader(upper)
    tree.prompt(tree.add(12, upper))
    assert spans(tree) == [(0, 8), (8, 18)]
    assert above.row[:8].eq(0).all()


def test_what_somebody_reads_exactly_waits_until_that_one_lets_go():
    tree, recorder = cache()
    node = tree.add(20)
    exact, other = tree.reader(node), tree.reader(node)
    tree.prefixes.readers[exact].is_exact = True
    reader = tree.prompt(node)
    assert (
        spans(tree) == [] and recorder.emitted == [("refused", "in-use", 18)] and len(tree.prefixes.table.wanted) == 1
    )
    tree.release(reader)
    assert spans(tree) == []
    tree.release(exact, Released.RETRACTED)
    assert spans(tree) == [(0, 18)] and len(tree.prefixes.table.wanted) == 0
    assert other.row[:18].eq(0).all()


def test_a_range_given_up_for_want_of_memory_is_told_with_its_own_tokens(monkeypatch):
    tree, recorder = cache(observation_bytes=0)
    node = tree.add(20)
    tree.release(tree.prompt(node))
    last = tree.add(10, node)
    exact = tree.reader(last)
    tree.prefixes.readers[exact].is_exact = True
    monkeypatch.setattr(Resizer, "can_rank", lambda _, segment: segment.prompt is not None)
    assert tree.prefixes.resizer.shrink(path_to(last), 28, LargePrompt())
    assert recorder.emitted[1:] == [("refused", "in-use", 10), ("refused", "no-memory", 10)]
    assert len(tree.prefixes.table.wanted) == 0


def test_a_lock_that_no_reader_explains_is_waited_for():
    tree, _ = cache()
    node = tree.add(20)
    node.locks += 1
    reader = tree.prompt(node)
    assert spans(tree) == [] and len(tree.prefixes.table.wanted) == 1
    for each in (node, node.parent):
        each.locks -= 1
    tree.release(reader)
    assert spans(tree) == [(0, 18)]


def test_a_range_goes_with_its_node():
    tree, _ = cache()
    node = tree.add(20)
    exact = tree.reader(node)
    tree.prefixes.readers[exact].is_exact = True
    tree.release(tree.prompt(node))
    (segment,) = tree.prefixes.table.wanted
    end = tree.prefixes.table.in_place[segment]
    tree.unlock(exact)
    tree.drop(node)
    tree.drop(end)
    assert len(tree.prefixes.table.wanted) == 0


def test_dropping_the_lower_part_of_a_segment_repacks_it():
    tree, recorder = cache()
    tree.release(tree.prompt(node := tree.add(22)))
    upper = node.parent
    tree.cut([upper], 8)
    tree.drop(node)
    tree.drop(upper)
    assert spans(tree) == [(0, 8)] and ("repacked", 10 - upper.parent.charged) in recorder.emitted
    held = upper.parent.charged
    assert tree.prefixes.spans[upper.parent].segment.num_slots == held < 10
    assert len(tree.free_slots) == 22 - held == len(set(tree.free_slots))


def test_a_policy_that_fails_leaves_the_range_as_it_is(monkeypatch):
    tree, _ = cache()
    monkeypatch.setattr(Compressor, "rank", lambda *_: 1 / 0)
    reader = tree.prompt(tree.add(20))
    assert spans(tree) == [] and tree.guard.errors[Place.COMPRESSION] == 1
    assert reader.row[:20].ne(0).all() and not tree.free_slots and len(tree.prefixes.table.wanted) == 0


def test_a_prefix_that_was_found_is_scored_in_passes_and_compressed():
    tree, recorder = cache(needs_passes=True)
    passes = FakePasses(tree)
    node = tree.add(24)
    tree.release(tree.prompt(node))
    assert not passes.run()
    tree.release(tree.prompt(tree.add(4, node), found=node))
    while passes.run():
        pass
    assert [len(probe) for _, probe in passes.started] == [16, 8]  # the tail too
    assert spans(tree) == [(0, 22)] and recorder.emitted == [("compressed", 0, 22, 1)]


@pytest.mark.parametrize(
    ("happens", "outcome"),
    [("abort", "aborted"), ("drop", "dropped"), ("lost", "aborted"), ("retract", "queued"), ("paused", "queued")],
)
def test_what_becomes_of_a_job(happens, outcome):
    tree, _ = cache(needs_passes=True)
    passes = FakePasses(tree)
    node = tree.add(24)
    tree.release(tree.prompt(node, warm=True, ticket=TICKET))
    if happens == "abort":
        assert passes.run(Released.ABORTED)
    elif happens == "retract":
        assert passes.run(Released.RETRACTED)
    elif happens == "paused":
        passes.is_paused = True
        assert not passes.run()
    else:
        tree.prefixes.between_steps(passes)
        assert len(passes.waiting) == 1
        if happens == "drop":
            tree.drop(node)
            tree.prefixes.between_steps(passes)
            assert not passes.waiting
        else:
            passes.waiting.clear()
            tree.prefixes.between_steps(passes)
    assert tree.prefixes.passes.jobs.outcomes == {ticket_digest(TICKET): outcome}


def test_a_request_that_will_not_be_cached_is_not_observed():
    """Nothing would ever use what was seen, and end it."""
    tree, _ = cache(needs_passes=True)
    node = tree.add(20)
    tree.release(tree.prompt(node))
    reader = tree.reader(node)
    assert tree.prefixes.prefills.matched(reader, is_cached=False).observation is None
    assert tree.prefixes.prefills.observe(reader, node, 20, 24, 24) == []
    assert tree.prefixes.readers[reader].is_live


def test_new_weights_leave_nothing_to_do():
    tree, _ = cache(needs_passes=True)
    passes = FakePasses(tree)
    node = tree.add(24)
    half_way = tree.reader(node)
    tree.observe(half_way, tree.root, 0, 10, prompt_len=24)
    tree.release(tree.prompt(node, warm=True, ticket=TICKET))
    tree.prefixes.keep_only_spans()
    assert not passes.run() and list(tree.prefixes.passes.jobs.outcomes.values()) == ["dropped"]
    assert not tree.prefixes.readers[half_way].is_complete


def test_a_flush_forgets_everything():
    tree, recorder = cache()
    tree.prompt(tree.add(20))
    tree.prefixes.cleared()
    assert not tree.prefixes.spans and recorder.emitted[-1] == ("cleared",)


def test_readers_that_share_are_counted_and_spans_are_read_in_path_order():
    tree, _ = cache()
    node = tree.add(20)
    tree.prompt(node)
    paths = tree.prefixes.reads([node, node, tree.root])
    assert [len(path) for path in paths] == [1, 1, 0] and tree.prefixes.max_sharers == 2
    tree.cut([node.parent], 7)
    (path,) = tree.prefixes.reads([node])
    assert [runs.num_tokens for runs in path] == [7, 11]
