"""Segments that are fitted after their passes, on SGLang's real tree and pools."""

from __future__ import annotations

import pytest
import torch

from helpers.fitted import biases_of, rows_of
from helpers.harness import Harness, PseudoRandomPolicy, publish_server_args
from helpers.harness_store import adoption, exported
from helpers.naming_fitter import NamingFitter, name_of
from helpers.passes import MiniScheduler
from sgl_kvevict.config import KVEvictConfig
from sgl_kvevict.errors import StoreError
from sgl_kvevict.guard import Place
from sgl_kvevict.prefix import Segment
from sgl_kvevict.sglang_adapter.monitoring.server_info import cache_state

DOCUMENT = [i * 7 % 11 for i in range(60)]
END = 56
"""Of what is compressed of the document: its tail stays."""
VALUES = {"budget": 0.3, "tail_tokens": 4, "sink_tokens": 2, "min_prefix_tokens": 6, "scoring_pass_tokens": 60}
NUM_LAYERS = 2


@pytest.fixture(scope="module", autouse=True)
def server_args(tmp_path_factory):
    publish_server_args(tmp_path_factory.mktemp("tiny-llama"))


def cache(block: int = 5, **fields) -> tuple[Harness, MiniScheduler]:
    """A document that passes have read: its segment is published, and waits for its fit."""
    policy = PseudoRandomPolicy(needs_passes=True, fitter=NamingFitter(block=block))
    harness = Harness(num_slots=400, config=KVEvictConfig(**(VALUES | fields)), policy=policy)
    harness.finish(harness.run(DOCUMENT))
    harness.finish(harness.run([*DOCUMENT, 1, 2, 3]))
    scheduler = MiniScheduler(harness)
    while scheduler.run_pass():
        pass
    return harness, scheduler


def segment_of(harness: Harness) -> Segment:
    (segment,) = {span.segment for span in harness.tree.spans.values()}
    return segment


def assert_fitted(harness: Harness, *, but: range = range(0)) -> None:
    """All entries have their biases but those of some tokens, which have none."""
    segment = segment_of(harness)
    biases, values = biases_of(harness.tree.packer, segment), rows_of(harness.tree.packer, segment)[1]
    is_left = (segment.positions >= but.start) & (segment.positions < but.stop)
    assert torch.equal(biases, torch.where(is_left, 0.0, name_of(values)))


def state(harness: Harness) -> dict:
    return cache_state(harness.tree)


def finish(scheduler: MiniScheduler) -> None:
    """Turns until no fit is under way."""
    for _ in range(NUM_LAYERS):
        scheduler.turn()
    assert len(scheduler.harness.tree.manager.fits) == 0


def test_a_segment_is_published_first_and_fitted_layer_by_layer():
    """Whoever waits for passes waits for the fit too, and its memory is counted."""
    harness, scheduler = cache()
    assert sorted((s.start, s.end) for s in harness.tree.spans.values()) == [(0, END)]
    # The turn that found no further pass fitted the first layer.
    assert state(harness)["scoring_jobs"] == 1 and state(harness)["fits"] == 0
    assert not segment_of(harness).is_fitted
    assert state(harness)["observation_bytes"] > 0
    reader = harness.run([*DOCUMENT, 5, 6])
    scheduler.turn()
    assert segment_of(harness).is_fitted
    assert_fitted(harness)
    before = harness.num_biases_read
    assert harness.decode(reader)
    assert harness.num_biases_read == before + segment_of(harness).num_entries
    assert state(harness)["scoring_jobs"] == 0
    assert (state(harness)["fits"], state(harness)["fits_given_up"]) == (1, 0)
    assert state(harness)["observation_bytes"] == 0
    harness.check()


def test_a_squeeze_in_the_middle_of_a_fit():
    """Entries left and moved; those that stay are fitted, each to its own."""
    harness, scheduler = cache(min_budget=0.1)
    before = segment_of(harness)
    harness.evict(harness.tree.evictable_size() - 12)
    assert segment_of(harness).num_entries < before.num_entries
    finish(scheduler)
    assert_fitted(harness)
    harness.check()


def test_a_fit_is_squeezed_with_its_entries():
    harness, scheduler = cache(min_budget=0.1)
    finish(scheduler)
    before = segment_of(harness).num_entries
    harness.evict(harness.tree.evictable_size() - 12)
    assert segment_of(harness).num_entries < before
    assert_fitted(harness)


@pytest.mark.parametrize("block", [5, 8])
def test_no_block_is_fitted_across_a_branch(block: int):
    """Whoever reads only the first 23 tokens reads nothing of those behind them."""
    harness, scheduler = cache(block)
    harness.finish(harness.run([*DOCUMENT[:23], 13, 14, 15]))
    assert sorted((s.start, s.end) for s in harness.tree.spans.values()) == [(0, 23), (23, END)]
    finish(scheduler)
    first = 23 // block * block
    assert_fitted(harness, but=range(first, first + block))


def test_a_branch_between_two_blocks_costs_nothing():
    harness, scheduler = cache()
    harness.finish(harness.run([*DOCUMENT[:25], 13, 14, 15]))
    finish(scheduler)
    assert_fitted(harness)


def test_a_part_was_dropped_in_the_middle_of_a_fit():
    """What is above is fitted, but for the block that went on below."""
    harness, scheduler = cache()
    harness.finish(harness.run([*DOCUMENT[:23], 13, 14, 15]))
    lower = next(node for node, span in harness.tree.spans.items() if span.end == END)
    reader = harness.request([*DOCUMENT[:23], 13, 14, 16])
    assert harness.admit(reader)
    while lower in harness.tree.spans:
        harness.evict(1)
    assert segment_of(harness).end == 23
    finish(scheduler)
    assert_fitted(harness, but=range(20, 25))
    assert state(harness)["fits"] == 1
    harness.check()


def test_a_dropped_segment_gives_its_fit_up():
    harness, scheduler = cache()
    harness.evict(harness.tree.evictable_size())
    assert not harness.tree.spans
    assert (state(harness)["fits_given_up"], state(harness)["scoring_jobs"]) == (1, 0)
    assert state(harness)["observation_bytes"] == 0
    scheduler.turn()


def test_a_flush_and_new_weights_give_fits_up():
    harness, _ = cache()
    harness.flush()
    assert state(harness)["fits_given_up"] == 1 and state(harness)["observation_bytes"] == 0
    harness, _ = cache()
    harness.tree.manager.forget_seen()
    assert state(harness)["fits_given_up"] == 1 and not segment_of(harness).is_fitted


def test_an_error_is_that_fits_failure(monkeypatch: pytest.MonkeyPatch):
    """The segment stays as it was selected; the next one is fitted."""
    harness, scheduler = cache()

    def fail(*args: object) -> None:
        raise RuntimeError("no result")

    with monkeypatch.context() as broken:
        broken.setattr(NamingFitter, "fit", fail)
        scheduler.turn()
    assert harness.tree.guard.errors[Place.FIT] == 1
    assert (state(harness)["fits"], state(harness)["fits_given_up"], state(harness)["scoring_jobs"]) == (0, 1, 0)
    assert not segment_of(harness).is_fitted
    harness.finish(harness.run([*DOCUMENT, 9]))
    harness.check()


def test_without_memory_a_prefix_is_only_selected():
    """Its passes have room; what a fit needs of them has none."""
    harness, scheduler = cache(observation_bytes=2000)
    assert not len(harness.tree.manager.fits)
    assert (state(harness)["compressions"], state(harness)["fits_given_up"]) == (1, 1)
    scheduler.turn()
    assert not segment_of(harness).is_fitted


def test_nothing_is_fitted_where_everything_is_kept():
    harness, _ = cache(budget=1.0)
    assert state(harness)["compressions"] == 1
    assert not len(harness.tree.manager.fits) and not segment_of(harness).is_fitted
    assert (state(harness)["fits"], state(harness)["fits_given_up"]) == (0, 0)


def test_what_is_kept_in_a_store_is_told_after_the_fit(monkeypatch):
    """Else the store would keep what was only selected."""
    harness, scheduler = cache()
    told = []
    at_budget = lambda last: told.append(harness.tree.spans[last].segment.is_fitted)  # noqa: E731
    monkeypatch.setattr(harness.tree.manager.ranges, "at_budget", at_budget)
    finish(scheduler)
    assert told == [True]


def test_fits_come_before_further_passes():
    """Their memory is free again before anything else is observed."""
    harness, scheduler = cache()
    other = [i * 5 % 7 for i in range(60)]
    harness.finish(harness.run(other))
    harness.finish(harness.run([*other, 1]))
    scheduler.turn()
    assert segment_of(harness).is_fitted and not scheduler.waiting_queue
    scheduler.turn()
    assert len(scheduler.waiting_queue) == 1


def test_a_range_that_waits_for_an_exact_reader_is_only_selected():
    """What its fit needs of the passes is not held for as long as somebody reads exactly."""
    policy = PseudoRandomPolicy(needs_passes=True, fitter=NamingFitter())
    harness = Harness(num_slots=400, config=KVEvictConfig(**VALUES), policy=policy)
    scheduler = MiniScheduler(harness)
    harness.finish(harness.run(DOCUMENT))
    harness.finish(harness.run([*DOCUMENT, 1, 2, 3]))
    exact = harness.request([*DOCUMENT, 4])
    harness.tree.manager.readers[exact].is_exact = True
    assert harness.admit(exact) and harness.prefill(exact)
    assert scheduler.run_all() > 0
    assert state(harness)["pending_ranges"] == 1 and state(harness)["fits_given_up"] == 1
    harness.finish(exact)
    assert state(harness)["compressions"] == 1
    assert not len(harness.tree.manager.fits) and not segment_of(harness).is_fitted


def test_a_fitted_segment_leaves_for_a_store_and_comes_back():
    """Through bytes, into other slots of another pool; who fits nothing refuses it, and goes on."""
    harness, scheduler = cache()
    finish(scheduler)
    (record,) = exported(harness)
    other, _ = cache()
    other.flush()
    other.finish(other.run([9, 9, 9]))  # so that slots are others
    assert adoption(other).adopt(record, (None, None))
    assert_fitted(other)
    reader = other.run([*DOCUMENT, 5, 6])
    assert other.num_biases_read >= segment_of(other).num_entries
    other.finish(reader)
    plain = Harness(num_slots=400, config=KVEvictConfig(**VALUES))
    with pytest.raises(StoreError, match="nothing is fitted here"):
        adoption(plain).adopt(record, (None, None))
    plain.check()
