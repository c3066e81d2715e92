"""Prefixes that passes of our own read before they are compressed."""

from __future__ import annotations

import math
from array import array
from types import SimpleNamespace

import pytest
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from helpers.harness import Harness, PseudoRandomPolicy
from helpers.passes import TURN_S, Letters, MiniScheduler
from sgl_kvevict.cache.pacing import ASSUMED_PASS_S, BUSY_TOKENS, QUIET_S
from sgl_kvevict.cache.passes import ANSWER_RADIUS
from sgl_kvevict.cache.probes import REPEAT
from sgl_kvevict.config import KVEvictConfig
from sgl_kvevict.request import ticket_digest
from sgl_kvevict.segments import MeasuredRange
from sgl_kvevict.sglang_adapter.monitoring.server_info import cache_state

DOCUMENT = [i * 7 % 11 for i in range(60)]
TICKET = "a-random-text-of-the-asker"
WARM = {"warm": True, "ticket": TICKET}


def cache(num_slots=400, *, scores_any_range=False, **fields) -> tuple[Harness, MiniScheduler]:
    values = {"budget": 0.3, "tail_tokens": 4, "sink_tokens": 2, "min_prefix_tokens": 6, "scoring_pass_tokens": 20}
    config = KVEvictConfig(**(values | fields))
    harness = Harness(num_slots=num_slots, config=config, policy=PseudoRandomPolicy(needs_passes=True))
    return harness, MiniScheduler(harness)


def spans(harness):
    return sorted((s.start, s.end) for s in harness.tree.spans.values())


def outcome(harness):
    """What became of ``WARM``."""
    outcomes = cache_state(harness.tree)["warm_outcomes"]
    assert TICKET not in str(outcomes)
    return outcomes.get(ticket_digest(TICKET))


def ask(harness, *suffix, extra_key=None):
    harness.finish(harness.run([*DOCUMENT, *suffix], extra_key))


def test_a_prefix_is_scored_once_it_was_found_by_somebody():
    harness, scheduler = cache()
    ask(harness, 1, 2, 3)
    assert scheduler.run_all() == 0 and spans(harness) == []
    ask(harness, 4, 5, 6)
    assert scheduler.run_all() == 3  # 60 tokens to repeat, 20 a pass
    assert spans(harness) == [(0, 56)]
    ask(harness, 7, 8, 9)
    assert scheduler.run_all() == 0


def test_number_of_matches_is_configurable_and_null_means_one_where_nothing_else_can_score():
    harness, scheduler = cache(score_after_matches=2)
    ask(harness, 1, 2, 3)
    ask(harness, 4, 5, 6)
    assert scheduler.run_all() == 0
    ask(harness, 7, 8, 9)
    assert scheduler.run_all() == 3
    harness, scheduler = cache(score_after_matches=None)
    ask(harness, 1, 2, 3)
    assert scheduler.run_all() == 0
    ask(harness, 4, 5, 6)
    assert scheduler.run_all() == 3 and spans(harness) == [(0, 56)]


def test_passes_insert_nothing_leak_nothing_and_answer_no_one():
    harness, scheduler = cache()
    req = harness.request(DOCUMENT, options=WARM)
    req.sampling_params.max_new_tokens = 1
    assert harness.admit(req) and harness.prefill(req)
    nodes = len(list(harness.tree.nodes()))
    assert scheduler.run_all(chunk=7) == 3
    assert all(probe.finished_output and probe.skip_radix_cache_insert for probe in scheduler.passes)
    assert len(list(harness.tree.nodes())) == nodes + 1  # the tail was cut off
    assert outcome(harness) == "compressed"
    assert harness.allocator.available_size() + harness.tree.evictable_size() == harness.num_slots


def test_a_prompt_without_output_is_taken_for_a_prefix():
    harness, scheduler = cache()
    req = harness.request(DOCUMENT)
    req.sampling_params.max_new_tokens = 0
    assert harness.admit(req) and harness.prefill(req)
    assert scheduler.run_all() == 3 and spans(harness) == [(0, 56)]


def test_what_is_still_read_is_compressed_under_its_readers():
    harness, scheduler = cache()
    reader = harness.run([*DOCUMENT, 1, 2, 3], options=WARM)
    assert scheduler.run_all() == 4
    assert spans(harness) == [(0, 59)] and outcome(harness) == "compressed"
    harness.decode(reader)
    harness.finish(reader)


def test_what_is_read_exactly_is_compressed_when_that_reader_leaves():
    harness, scheduler = cache()
    reader = harness.run([*DOCUMENT, 1, 2, 3], options=WARM)
    harness.tree.prefixes.readers[reader].is_exact = True
    assert scheduler.run_all() == 4
    assert spans(harness) == [] and outcome(harness) == "in-use"
    harness.decode(reader)
    harness.finish(reader)
    assert spans(harness) == [(0, 59)]


def test_passes_are_counted():
    harness, scheduler = cache()
    totals = harness.tree.prefixes.totals
    harness.finish(harness.run(DOCUMENT, options=WARM))
    scheduler.run_all()
    assert (totals.scoring_passes, totals.compressions) == (3, 1)
    scheduler.max_req_input_len = 90
    harness.finish(harness.run([9, *DOCUMENT], options=WARM))
    scheduler.run_all()
    assert totals.refused_no_room == 1


def turns_until_a_pass(scheduler, num_others):
    """Turns of the loop until a pass waits beside so many others."""
    for turn in range(1000):
        if len(scheduler.waiting_queue) > num_others:
            return turn
        scheduler.turn()
    raise AssertionError("no pass was started")


BUSY_TURNS = math.ceil(ASSUMED_PASS_S * (1 / 0.2 - 1) / TURN_S) + 1
"""Turns until the first pass of a server with ``pass_share=0.2`` that is never idle."""


@pytest.mark.parametrize("users", ["run", "are prefilled", "are in the middle of a prefill"])
def test_beside_users_passes_take_a_share_of_the_time(users):
    harness, scheduler = cache(pass_share=0.2, scoring_pass_tokens=200, num_slots=900)
    harness.finish(harness.run([i % 251 for i in range(220)], options={"warm": True}))
    user = harness.request(DOCUMENT)
    scheduler.running_batch.reqs = [user] if users == "run" else []
    extend = SimpleNamespace(reqs=[user], forward_mode=ForwardMode.EXTEND)
    scheduler.last_batch = extend if users == "are prefilled" else None
    scheduler.chunked_req = user if users == "are in the middle of a prefill" else None
    assert turns_until_a_pass(scheduler, 0) == BUSY_TURNS
    scheduler.turn()
    assert len(scheduler.waiting_queue) == 1  # one pass at a time
    assert scheduler.run_pass()
    lead = len(Letters().encode(REPEAT + "\n\n", False))
    assert len(scheduler.passes[0].origin_input_ids) == 220 + lead + BUSY_TOKENS
    for _ in range(3):
        scheduler.turn()
    assert scheduler.waiting_queue == []
    user.finished_reason = FINISH_ABORT()
    scheduler.last_batch = None
    scheduler.now += QUIET_S
    assert scheduler.run_pass()  # nobody is left to wait for
    assert len(scheduler.passes[1].origin_input_ids) == 220 + lead + 220 - BUSY_TOKENS
    assert not scheduler.run_pass() and len(spans(harness)) == 1


def test_no_pass_starts_while_a_request_waits_and_a_waiting_one_makes_room():
    harness, scheduler = cache(pass_share=1.0)
    harness.finish(harness.run(DOCUMENT, options=WARM))
    user = harness.request(DOCUMENT)
    scheduler.waiting_queue.append(user)
    for _ in range(20):
        scheduler.turn()
    assert scheduler.waiting_queue == [user]
    scheduler.waiting_queue.clear()
    scheduler.turn()
    assert len(scheduler.waiting_queue) == 1 and harness.tree.prefixes.passes.running in scheduler.waiting_queue
    scheduler.waiting_queue.append(user)
    scheduler.turn()
    assert scheduler.waiting_queue == [user] and harness.tree.prefixes.passes.running is None
    scheduler.waiting_queue.clear()
    assert scheduler.run_all() == 3 and spans(harness) == [(0, 56)]  # nothing of it is lost


def test_a_request_that_comes_soon_after_an_answer_meets_no_pass():
    """Although nothing waited for a pass while it ran: jobs come when prompts are complete."""
    harness, scheduler = cache()
    user = harness.request([1, 2, 3])
    for _ in range(3):
        scheduler.running_batch.reqs = [user]
        for _ in range(10):
            scheduler.turn()
        scheduler.running_batch.reqs = []
        harness.finish(harness.run(DOCUMENT, options=WARM))
        for _ in range(int(2 / TURN_S)):
            scheduler.turn()
        assert scheduler.waiting_queue == []
    assert turns_until_a_pass(scheduler, 0) <= (QUIET_S - 2) / TURN_S + 1


def test_users_who_come_during_a_pass_are_noticed():
    """The next one waits for a quiet time again, and is short."""
    harness, scheduler = cache(num_slots=1500, scoring_pass_tokens=512)
    harness.finish(harness.run([i % 251 for i in range(300)], options=WARM))
    scheduler.turn()
    (running,) = scheduler.waiting_queue
    assert harness.admit(running) and harness.prefill(running, 310)
    scheduler.waiting_queue.clear()
    scheduler.running_batch.reqs = [running, harness.request(DOCUMENT)]
    scheduler.turn()
    scheduler.running_batch.reqs = []
    assert harness.prefill(running)
    for _ in range(int(2 / TURN_S)):
        scheduler.turn()
    assert scheduler.waiting_queue == []
    turns_until_a_pass(scheduler, 0)
    lead = len(Letters().encode(REPEAT + "\n\n", False))
    assert len(scheduler.waiting_queue[0].origin_input_ids) == 300 + lead + BUSY_TOKENS


def test_a_grammar_that_is_compiled_is_a_user():
    harness, scheduler = cache()
    harness.finish(harness.run(DOCUMENT, options=WARM))
    scheduler.grammar_manager.grammar_queue.append(harness.request(DOCUMENT))
    for _ in range(int(QUIET_S / TURN_S)):
        scheduler.turn()
    assert not scheduler.waiting_queue


def test_a_probe_of_the_servers_health_is_no_user():
    """One comes every few seconds, and a server is idle for all that."""
    harness, scheduler = cache()
    harness.finish(harness.run(DOCUMENT, options=WARM))
    probe = harness.request(DOCUMENT)
    probe.rid = f"{HEALTH_CHECK_RID_PREFIX}_1"
    scheduler.running_batch.reqs = [probe]
    assert turns_until_a_pass(scheduler, 0) == 1


def test_an_idle_step_beside_other_ranks_counts_as_a_user():
    """With data-parallel attention: a pass of this rank would make the users of others wait."""
    harness, scheduler = cache(pass_share=0.2)
    harness.finish(harness.run(DOCUMENT, options=WARM))
    scheduler.last_batch = SimpleNamespace(reqs=[], forward_mode=ForwardMode.IDLE)
    assert turns_until_a_pass(scheduler, 0) == BUSY_TURNS


def test_a_turn_after_a_users_last_step_is_not_quiet():
    """With the overlap schedule it may process another step of that user, and a sleeping scheduler does not sleep."""
    harness, scheduler = cache(pass_share=0.1)
    harness.finish(harness.run(DOCUMENT, options=WARM))
    user = harness.request(DOCUMENT)
    user.finished_reason = FINISH_ABORT()
    scheduler.last_batch = SimpleNamespace(reqs=[user], forward_mode=ForwardMode.DECODE)
    scheduler.turn()
    assert not scheduler.waiting_queue
    scheduler.last_batch = None
    scheduler.now += QUIET_S
    assert scheduler.run_pass()
    scheduler.last_batch = SimpleNamespace(reqs=scheduler.passes, forward_mode=ForwardMode.EXTEND)
    assert scheduler.run_pass()  # a pass is no user


def test_questions_given_with_a_prefix_replace_its_repetition():
    harness, scheduler = cache()
    harness.finish(harness.run(DOCUMENT, options={"warm": True, "questions": ["who", "where"]}))
    assert scheduler.run_all() == 2
    tail = [list(req.origin_input_ids)[60:] for req in scheduler.passes]
    encode = Letters().encode
    assert tail == [encode("who\n\n", False), encode("where\n\n", False)]


@pytest.mark.parametrize(("options", "radius"), [(WARM, 0), ({"warm": True, "questions": ["who"]}, ANSWER_RADIUS)])
def test_what_questions_attend_to_reaches_around(monkeypatch, options, radius):
    harness, scheduler = cache()
    build, built = MeasuredRange.show, set()
    monkeypatch.setattr(
        MeasuredRange, "show", lambda one, *args: built.add((one.readers.radius, one.is_asked)) or build(one, *args)
    )
    harness.finish(harness.run(DOCUMENT, options=options))
    scheduler.run_all()
    ask(harness, 1, 2, 3)
    assert built == {(radius, radius > 0)} and spans(harness) == [(0, 56)]


def test_namespaces_are_scored_apart():
    harness, scheduler = cache()
    ask(harness, 1, 2, 3, extra_key="a")
    ask(harness, 4, 5, 6, extra_key="b")
    assert scheduler.run_all() == 0
    ask(harness, 7, 8, 9, extra_key="b")
    assert scheduler.run_all() == 3
    assert {req.extra_key for req in scheduler.passes} == {"b"} and spans(harness) == [(0, 56)]


def test_a_job_ends_with_its_prefix():
    harness, scheduler = cache()
    req = harness.run(DOCUMENT, options=WARM)
    harness.finish(req)
    assert scheduler.run_pass()
    harness.tree.evict(EvictParams(num_tokens=harness.num_slots))
    assert scheduler.run_all() == 0
    assert outcome(harness) == "dropped"


def test_an_aborted_pass_ends_its_job():
    harness, scheduler = cache()
    req = harness.run(DOCUMENT, options=WARM)
    harness.finish(req)
    scheduler.turn()
    scheduler.waiting_queue.clear()
    scheduler.turn()
    assert outcome(harness) == "aborted"
    harness.finish(harness.run([*DOCUMENT, 1], options=WARM))
    assert scheduler.run_all() == 3


def test_no_room_for_a_pass_is_said():
    harness, scheduler = cache()
    scheduler.max_req_input_len = 90
    req = harness.run(DOCUMENT, options=WARM)
    harness.finish(req)
    assert scheduler.run_all() == 0 and outcome(harness) == "no-room"


def test_what_is_too_short_is_said():
    harness, scheduler = cache()
    req = harness.run(DOCUMENT[:9], options=WARM)
    harness.finish(req)
    assert scheduler.run_all() == 0 and spans(harness) == []
    assert outcome(harness) == "too-short"


def test_a_prefix_that_is_compressed_already_is_not_called_too_short():
    harness, scheduler = cache()
    harness.finish(harness.run(DOCUMENT, options=WARM))
    assert scheduler.run_all() == 3 and outcome(harness) == "compressed"
    harness.finish(harness.run(DOCUMENT, options=WARM))
    assert scheduler.run_all() == 0 and outcome(harness) == "compressed"
    harness.finish(harness.run(DOCUMENT, options=WARM | {"questions": ["aaa"]}))
    assert scheduler.run_all() == 0 and outcome(harness) == "questions-too-late"
    harness.finish(harness.run([*DOCUMENT, 1], options=WARM))
    assert scheduler.run_all() == 0 and outcome(harness) == "too-short"


@pytest.mark.parametrize("broken", ["order", "merge"])
@pytest.mark.parametrize("scores_any_range", [False, True])
def test_a_prefix_for_which_the_policy_fails_is_not_called_compressed(monkeypatch, broken, scores_any_range):
    """With passes, and without: learned scores choose at once."""
    monkeypatch.setattr(PseudoRandomPolicy, broken, lambda *_: 1 / 0)
    config = KVEvictConfig(budget=0.3, tail_tokens=4, sink_tokens=2, min_prefix_tokens=6)
    policy = PseudoRandomPolicy(needs_passes=True)
    harness = Harness(num_slots=400, config=config, policy=policy, scores_any_range=scores_any_range)
    harness.finish(harness.run(DOCUMENT, options=WARM))
    assert (MiniScheduler(harness).run_all() > 0) is not scores_any_range
    assert spans(harness) == [] and outcome(harness) == "failed"
    monkeypatch.undo()
    if scores_any_range:
        reader = harness.request([*DOCUMENT, 1], options=WARM)
        harness.tree.prefixes.readers[reader].is_exact = True
        assert harness.admit(reader) and harness.prefill(reader) and outcome(harness) == "in-use"
        harness.finish(reader)
        assert spans(harness) != []


@pytest.mark.parametrize("num_tokens", [3, 4, 9])
def test_a_prompt_too_short_for_learned_scores_is_not_called_compressed(num_tokens):
    config = KVEvictConfig(budget=0.3, tail_tokens=4, sink_tokens=2, min_prefix_tokens=6)
    harness = Harness(config=config, policy=PseudoRandomPolicy(needs_passes=True), scores_any_range=True)
    harness.finish(harness.run(DOCUMENT[:num_tokens], options=WARM))
    assert spans(harness) == [] and outcome(harness) == "too-short"
    for _ in range(2):
        harness.finish(harness.run(DOCUMENT, options=WARM))
        assert spans(harness)[-1][1] == 56 and outcome(harness) == "compressed"
    harness.finish(harness.run([*DOCUMENT, 1], options=WARM))
    assert outcome(harness) == "too-short"


@pytest.mark.parametrize("forget", [Harness.flush, lambda harness: harness.tree.forget_compressed()])
def test_a_flush_and_new_weights_forget_jobs(forget):
    harness, scheduler = cache()
    harness.finish(harness.run(DOCUMENT, options=WARM))
    forget(harness)
    assert cache_state(harness.tree)["scoring_jobs"] == 0 and scheduler.run_all() == 0
    assert outcome(harness) == "dropped"


def test_a_job_waits_while_its_pass_is_retracted_or_generation_is_paused():
    harness, scheduler = cache()
    harness.finish(harness.run(DOCUMENT, options=WARM))
    scheduler._engine_paused = True
    assert not scheduler.run_pass() and outcome(harness) == "queued"
    scheduler._engine_paused = False
    scheduler.turn()
    (req,) = scheduler.waiting_queue
    assert harness.admit(req) and harness.prefill(req, 70)
    harness.retract(req)
    assert outcome(harness) == "queued"
    assert scheduler.run_all() == 3 and outcome(harness) == "compressed"


def test_a_pass_does_not_count_as_a_reader_of_other_prefixes():
    harness, scheduler = cache()
    harness.finish(harness.run(DOCUMENT, options=WARM))
    scheduler.run_all()
    longer = array("q", [*DOCUMENT, *range(11, 40)])
    harness.finish(harness.run(list(longer)))
    assert scheduler.run_all() == 0
