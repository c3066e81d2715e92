"""What was compressed before its passes came is read by them; what shrinks between two passes is read on."""

from __future__ import annotations

from helpers.harness import Harness, PseudoRandomPolicy
from helpers.passes import MiniScheduler
from sgl_kvevict.config import KVEvictConfig
from sgl_kvevict.policies.order import scores_of
from sgl_kvevict.policies.scorers import joint_attention
from sgl_kvevict.request import ticket_digest
from sgl_kvevict.sglang_adapter.monitoring.server_info import cache_state
from sgl_kvevict.sglang_adapter.passes import SchedulerPasses

DOCUMENT = [i * 7 % 11 for i in range(60)]
TICKET = "a-random-text-of-the-asker"
WARM = {"warm": True, "ticket": TICKET}


def cache(**fields) -> tuple[Harness, MiniScheduler]:
    """A cache in which any range can be compressed at any time."""
    values = {"budget": 0.3, "tail_tokens": 4, "sink_tokens": 2, "min_prefix_tokens": 6, "scoring_pass_tokens": 20}
    values |= {"score_after_matches": 1}
    policy = PseudoRandomPolicy(needs_passes=True)
    harness = Harness(num_slots=400, config=KVEvictConfig(**(values | fields)), policy=policy, scores_any_range=True)
    return harness, MiniScheduler(harness)


def ask(harness, *suffix):
    harness.finish(harness.run([*DOCUMENT, *suffix]))


def outcome(harness):
    """What became of ``WARM``."""
    return cache_state(harness.tree)["warm_outcomes"].get(ticket_digest(TICKET))


def segment_of(harness, start=0):
    (segment,) = {span.segment for span in harness.tree.spans.values() if span.start == start}
    return segment


def shrink(harness, num_slots=1):
    """Slots are short: one round of shrinking."""
    assert harness.tree.prefixes.pressure.reclaim(None) >= num_slots
    harness.check()


def test_passes_read_what_was_compressed_before_they_came():
    harness, scheduler = cache()
    ask(harness, 1, 2, 3)
    shrink(harness)
    segment = segment_of(harness)
    assert (segment.num_slots, segment.is_measured) == (30, False)  # half of 59 tokens
    ask(harness, 4, 5, 6)
    assert scheduler.run_all() == 3
    assert segment_of(harness) is segment and (segment.num_slots, segment.is_measured) == (18, True)
    ask(harness, 7, 8, 9)
    assert scheduler.run_all() == 0


def test_what_passes_paid_and_what_was_predicted_decide_what_a_light_prefix_keeps():
    harness, scheduler = cache(sink_tokens=0)
    ask(harness, 1, 2, 3)
    shrink(harness)
    ask(harness, 4, 5, 6)
    assert scheduler.run_pass()
    segment = segment_of(harness)
    light = segment.storage
    segment.attention[:] = light.positions  # as if the last tokens were paid most
    num_kept, predicted = 18 * harness.geometry.num_runs, scores_of(segment.order.keys)
    scores = joint_attention(light.positions.float().sqrt(), predicted).half()
    scheduler.run_pass()
    scheduler.run_pass()
    kept = segment_of(harness).storage.positions.sort().values
    assert kept.equal(light.positions[scores.topk(num_kept).indices].sort().values)
    assert kept.float().mean() > light.positions.float().mean()


def test_a_prefix_that_shrinks_between_two_passes_is_read_on():
    harness, scheduler = cache()
    harness.finish(harness.run(DOCUMENT, options=WARM))
    assert scheduler.run_pass()
    shrink(harness)
    assert segment_of(harness).num_slots == 28 and segment_of(harness).attention.gt(0).all()
    assert scheduler.run_pass()
    shrink(harness)
    assert segment_of(harness).num_slots == 17
    assert scheduler.run_all() == 1 and outcome(harness) == "compressed"
    assert segment_of(harness).is_measured


def test_a_pass_in_the_middle_goes_on_with_the_entries():
    harness, scheduler = cache(scoring_pass_tokens=200)
    harness.finish(harness.run(DOCUMENT, options=WARM))
    scheduler.turn()
    (req,) = scheduler.waiting_queue
    scheduler.waiting_queue.clear()
    assert harness.admit(req) and harness.prefill(req, 80)
    (segment,) = harness.tree.prefixes.table.in_place
    before = segment.attention[0, 0, 0].clone()
    shrink(harness)
    assert segment is segment_of(harness) and before > 0
    assert len(segment.attention) == segment.num_entries and segment.attention.allclose(before)
    assert harness.prefill(req)
    assert outcome(harness) == "compressed" and segment_of(harness).num_slots == 17


def test_a_job_that_ends_early_leaves_its_segments_to_the_next_one():
    harness, scheduler = cache()
    ask(harness, 1, 2, 3)
    shrink(harness)
    ask(harness, 4, 5, 6)
    assert scheduler.run_pass()
    harness.tree.prefixes.passes.abort(SchedulerPasses(scheduler))
    assert segment_of(harness).attention is None and scheduler.run_all() == 0
    ask(harness, 7, 8, 9)
    assert scheduler.run_all() == 3 and segment_of(harness).is_measured


def test_entries_below_a_prefix_are_not_read_with_it():
    """A segment that goes on where the prefix ends has entries that its readers do not see."""
    harness, scheduler = cache()
    harness.finish(harness.run([*DOCUMENT, *range(20)]))
    shrink(harness)
    ask(harness, 4, 5, 6)
    assert scheduler.run_all() == 0
    assert not segment_of(harness).is_measured


def test_what_cannot_shrink_is_not_read():
    harness, scheduler = cache()
    ask(harness, 1, 2, 3)
    for _ in range(3):
        shrink(harness)
    ask(harness, 4, 5, 6)
    assert scheduler.run_all() == 0
