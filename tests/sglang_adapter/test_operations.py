"""Changes of the weights, and what of a prompt is computed anew."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sglang.srt.managers.io_struct import EndWeightUpdateReqOutput

from helpers.harness import DOCUMENT, WINDOWS, Harness
from sgl_kvevict.sglang_adapter import operations

found = Harness.serve


@pytest.fixture
def harness() -> Harness:
    """The document is in the cache."""
    harness = Harness(num_slots=400)
    harness.finish(harness.run([*DOCUMENT, 1]))
    return harness


def manager_of(harness) -> SimpleNamespace:
    """Who updates the weights of a scheduler."""
    return SimpleNamespace(scheduler=SimpleNamespace(tree_cache=harness.tree))


def change_weights(harness) -> None:
    operations.after_flush((True, ""), manager_of(harness))
    harness.check()


@pytest.mark.parametrize("windows", [(), WINDOWS])
def test_nothing_compressed_is_found_under_other_weights(windows):
    harness = Harness(num_slots=400, windows=windows)
    harness.finish(harness.run([*DOCUMENT, 1]))
    assert found(harness, [*DOCUMENT, 2]) >= (0 if windows else 57)
    assert harness.tree.spans
    change_weights(harness)
    assert not harness.tree.spans and found(harness, [*DOCUMENT, 3]) == 0


def test_readers_of_compressed_prefixes_run_on_and_then_these_go(harness):
    reader = harness.run([*DOCUMENT, 2])
    half_way = harness.request([*DOCUMENT, *range(9)])
    assert harness.admit(half_way) and harness.prefill(half_way, 63)
    change_weights(harness)
    assert harness.tree.spans
    later = harness.request([*DOCUMENT, 3])
    assert harness.admit(later) and later.prefix_len == 0 and harness.prefill(later)
    assert harness.decode(reader) and harness.prefill(half_way) and harness.decode(later)
    harness.finish(half_way)
    assert harness.tree.spans
    harness.finish(reader)
    assert not any(map(harness.tree._blocking.is_retired, harness.tree.nodes()))
    harness.finish(later)
    assert found(harness, [*DOCUMENT, 5]) > 50


def test_a_prefix_of_other_weights_may_be_evicted_before_anybody_lets_go(harness):
    """Its only reader never began, so nobody said that it let go."""
    waiting = harness.request([*DOCUMENT, 2])
    assert harness.admit(waiting)
    change_weights(harness)
    assert harness.tree.spans
    harness._cancel(waiting)
    harness.evict(harness.num_slots)
    assert not harness.tree.spans
    harness.finish(harness.run([*DOCUMENT, 3]))
    assert found(harness, [*DOCUMENT, 5]) > 50


def test_a_branch_of_a_prefix_of_other_weights_goes_at_once_if_nobody_reads_it():
    harness = Harness(num_slots=400)
    for suffix in ([1] * 20, [2] * 20):
        harness.finish(harness.run([*DOCUMENT, *suffix]))
    reader = harness.run([*DOCUMENT, *[2] * 20, 3])
    before = harness.tree.held_slots()
    change_weights(harness)
    assert harness.tree.held_slots() < before
    assert all(harness.tree.port.num_locks(node) for node in harness.tree.nodes())
    change_weights(harness)  # once more, while it is read
    assert harness.decode(reader)
    harness.finish(reader)
    assert not harness.tree.spans
    assert harness.allocator.available_size() + harness.tree.evictable_size() == harness.num_slots


def test_a_reader_of_other_weights_that_is_retracted_begins_anew(harness):
    reader = harness.run([*DOCUMENT, 2])
    assert harness.decode(reader)
    change_weights(harness)
    harness.retract(reader)
    assert not harness.tree.spans
    assert harness.admit(reader) and reader.prefix_len == 0 and harness.prefill(reader)
    harness.finish(reader)
    assert found(harness, [*DOCUMENT, 5]) > 50


def test_readers_of_old_and_of_new_weights_end_in_any_order():
    for first in (0, 1):
        harness = Harness(num_slots=400)
        readers = []
        for _ in range(2):
            harness.finish(harness.run([*DOCUMENT, 1]))
            readers.append(harness.run([*DOCUMENT, 2]))
            change_weights(harness)
        assert all(reader.prefix_len >= 57 for reader in readers)
        for reader in (readers[first], readers[1 - first]):
            assert harness.decode(reader)
            harness.finish(reader)
        assert not harness.tree.spans


@pytest.mark.parametrize("start", [0, 20])
def test_log_probabilities_of_a_prompt_come_from_its_own_tokens(harness, start):
    """Also in later chunks: the prompt's chunks are not exchanged for the compressed prefix that is cached already."""
    req = harness.request([*DOCUMENT, 2])
    req.return_logprob, req.logprob_start_len = True, start
    assert harness.admit(req) and req.prefix_len == start
    for end in (25, 40, 50):
        assert harness.prefill(req, end)
        (path,) = harness.tree.read_paths([req])
        assert sum(runs.num_tokens for runs in path) == start
    assert harness.prefill(req) and harness.decode(req)
    harness.finish(req)
    assert harness.allocator.available_size() + harness.tree.evictable_size() == harness.num_slots


def test_the_end_of_a_session_that_is_refused_forgets_nothing(harness):
    manager = manager_of(harness)
    operations.after_session(EndWeightUpdateReqOutput(success=False, message="no session"), manager)
    assert found(harness, [*DOCUMENT, 2]) >= 57
    operations.after_session(EndWeightUpdateReqOutput(success=True, message=""), manager)
    assert found(harness, [*DOCUMENT, 3]) < 57
