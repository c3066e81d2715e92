"""Passes are complete requests to the scheduler, and never stand in the way of operations on the whole server."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import pytest
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.managers.io_struct import EndWeightUpdateReqOutput
from sglang.srt.managers.schedule_policy import CacheAgnosticPolicy, CacheAwarePolicy, SchedulePolicy
from sglang.srt.managers.scheduler import Scheduler

from helpers.harness import Harness, PseudoRandomPolicy
from helpers.passes import MiniScheduler
from sgl_kvevict.cache import passes
from sgl_kvevict.config import KVEvictConfig
from sgl_kvevict.request import ticket_digest
from sgl_kvevict.sglang_adapter import operations
from sgl_kvevict.sglang_adapter.monitoring.server_info import cache_state

DOCUMENT = [i * 7 % 11 for i in range(60)]
POLICIES = [*CacheAwarePolicy, *CacheAgnosticPolicy]


def cache(needs_passes=True, **policy) -> tuple[Harness, MiniScheduler]:
    config = KVEvictConfig(budget=0.3, tail_tokens=4, sink_tokens=2, min_prefix_tokens=6, scoring_pass_tokens=20)
    harness = Harness(num_slots=400, config=config, policy=PseudoRandomPolicy(needs_passes=needs_passes, **policy))
    return harness, MiniScheduler(harness)


def warm(harness, tokens=DOCUMENT, extra_key=None, ticket=None, lora_id=None):
    options = {"warm": True} | ({} if ticket is None else {"ticket": ticket})
    harness.finish(harness.run(tokens, extra_key, options=options, lora_id=lora_id))


def outcome(harness, ticket) -> str | None:
    return cache_state(harness.tree)["warm_outcomes"].get(ticket_digest(ticket))


class Priorities(MiniScheduler):
    """A scheduler that wants a priority of every request; SGLang's own code sets it."""

    enable_priority_scheduling = True
    schedule_low_priority_values_first = False
    _set_or_validate_priority = Scheduler._set_or_validate_priority


@pytest.mark.parametrize("low_first", [False, True])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.value)
def test_every_schedule_policy_can_sort_a_pass(policy, low_first):
    harness, _ = cache()
    scheduler = Priorities(harness)
    scheduler.schedule_low_priority_values_first = low_first
    warm(harness)
    users = [harness.request([*DOCUMENT, i]) for i in range(3)]
    for i, user in enumerate(users):
        user.priority = i
        user.time_stats.set_wait_queue_entry_time()
    scheduler.turn()
    scheduler.waiting_queue += users
    (waiting,) = [req for req in scheduler.waiting_queue if req not in users]
    sorts_by_priority = policy in (CacheAgnosticPolicy.FCFS, CacheAgnosticPolicy.LOF)
    chosen = SchedulePolicy(policy.value, harness.tree, False, sorts_by_priority, low_first)
    chosen.calc_priority(scheduler.waiting_queue, SimpleNamespace(reqs=[]), 10)
    assert len(scheduler.waiting_queue) == 4
    if policy is CacheAgnosticPolicy.FCFS:
        assert scheduler.waiting_queue[-1] is waiting  # the least urgent of all


def test_an_abort_by_prefix_matches_no_pass():
    harness, scheduler = cache()
    warm(harness, ticket="the-ticket-of-this")
    scheduler.turn()
    (waiting,) = scheduler.waiting_queue
    name = waiting.rid

    def abort(scheduler, recv_req):
        assert recv_req.abort_all or not waiting.rid.startswith(recv_req.rid)
        if recv_req.abort_all:
            scheduler.waiting_queue.clear()

    scheduler.tree_cache = harness.tree
    for rid in ("", "k", name):
        operations.around_abort(abort, scheduler, SimpleNamespace(rid=rid, abort_all=False))
    assert waiting.rid == name and type(waiting.rid) is str
    operations.around_abort(abort, scheduler, SimpleNamespace(rid="", abort_all=True))
    assert outcome(harness, "the-ticket-of-this") == "aborted" and not scheduler.waiting_queue
    scheduler.turn()
    warm(harness, [*DOCUMENT, 1])
    assert scheduler.run_all() == 3


def test_a_pass_reads_with_the_adapter_of_its_prefix_until_that_is_unloaded():
    harness, scheduler = cache()
    scheduler.tree_cache = harness.tree
    first, second, third = (LoRARef().lora_id for _ in range(3))
    manager = SimpleNamespace(lora_refs={first: "first", second: "second"})
    scheduler.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(lora_manager=manager))
    cases = ((None, None), ("tenant", None), ("tenant", second), (None, first), ("a key that ends as " + third, None))
    for extra_key, adapter in cases:
        warm(harness, extra_key=extra_key, lora_id=adapter)
        scheduler.turn()
        (waiting,) = scheduler.waiting_queue
        assert (waiting.lora_id, waiting.extra_key or "") == (adapter, (extra_key or "") + (adapter or ""))
        operations.before_unload(scheduler, SimpleNamespace(lora_id=third))
        assert waiting.lora_id == adapter
        operations.before_unload(scheduler, SimpleNamespace(lora_id=adapter))
        assert waiting.lora_id is None
        assert scheduler.run_all() == 3


def idle_scheduler(scheduler: MiniScheduler) -> MiniScheduler:
    """What an operation sees of a scheduler that runs nothing but, perhaps, a pass."""
    scheduler.tree_cache = scheduler.harness.tree
    scheduler.enable_overlap = True
    scheduler.result_queue = deque()
    scheduler.running_batch = SimpleNamespace(reqs=[], filter_batch=lambda: None)
    scheduler.last_batch = scheduler.chunked_req = None
    return scheduler


def test_a_waiting_pass_yields_and_its_job_goes_on_later():
    harness, scheduler = cache()
    warm(harness, ticket="the-ticket-of-this")
    scheduler.turn()
    operations.before_flush(idle_scheduler(scheduler))
    assert not scheduler.waiting_queue and len(harness.tree.prefixes.passes.jobs) == 1
    assert scheduler.run_all() == 3 and outcome(harness, "the-ticket-of-this") == "compressed"


def test_a_pass_in_the_middle_of_its_chunks_yields():
    harness, scheduler = cache()
    warm(harness)
    scheduler.turn()
    (req,) = scheduler.waiting_queue
    assert harness.admit(req) and harness.prefill(req, req.prefix_len + 5)
    scheduler.waiting_queue.clear()
    idle_scheduler(scheduler).chunked_req = req
    scheduler.last_batch = SimpleNamespace(reqs=[req])
    operations.before_flush(scheduler)
    harness.live.remove(req)
    assert scheduler.chunked_req is None and scheduler.last_batch is None
    harness.check()
    assert harness.allocator.available_size() + harness.tree.evictable_size() == harness.num_slots
    assert scheduler.run_all() == 3


def test_beside_users_nothing_is_ended():
    harness, scheduler = cache()
    warm(harness)
    scheduler.turn()
    (req,) = scheduler.waiting_queue
    assert harness.admit(req) and harness.prefill(req, req.prefix_len + 5)
    scheduler.waiting_queue.clear()
    user = harness.run([1, 2, 3])
    idle_scheduler(scheduler).chunked_req = req
    scheduler.last_batch = SimpleNamespace(reqs=[req, user])
    operations.before_flush(scheduler)
    assert scheduler.chunked_req is req and scheduler.last_batch is not None
    scheduler.last_batch = scheduler.chunked_req = None
    harness.prefill(req)
    harness.finish(user)
    assert scheduler.run_all() == 2


def test_a_queued_pass_ends_with_its_prefix():
    """A flush while the engine is paused takes the prefix, but not the queue."""
    harness, scheduler = cache()
    warm(harness, ticket="the-ticket-of-this")
    scheduler.turn()
    assert len(scheduler.waiting_queue) == 1
    harness.flush()
    assert outcome(harness, "the-ticket-of-this") == "dropped"
    scheduler.turn()
    assert not scheduler.waiting_queue


@pytest.mark.parametrize("attribute", ["_engine_paused", "flush_wrapper"])
def test_no_pass_begins_while_the_server_is_to_become_idle(attribute):
    harness, scheduler = cache()
    warm(harness)
    before = getattr(scheduler, attribute)
    setattr(scheduler, attribute, SimpleNamespace(_pending=1) if attribute == "flush_wrapper" else True)
    scheduler.turn()
    assert not scheduler.waiting_queue
    setattr(scheduler, attribute, before)
    assert scheduler.run_all() == 3


def test_jobs_of_several_namespaces_take_turns():
    harness, scheduler = cache()
    for i in range(3):
        warm(harness, [i, *DOCUMENT], "busy")
    warm(harness, [7, *DOCUMENT], "other")
    scheduler.run_all()
    order = [req.extra_key for req in scheduler.passes]
    assert len(order) == 16 and order[:8] == ["busy", "other"] * 4 and set(order[8:]) == {"busy"}
    assert scheduler.harness.tree.prefixes.passes.jobs._last_served == {}


def test_who_asks_for_more_than_can_wait_is_told_and_takes_no_others_place(monkeypatch):
    monkeypatch.setattr(passes, "MAX_JOBS", 4)
    harness, scheduler = cache()
    for i, namespace in enumerate(["one", "one", "one", "two", "three", "four"]):
        warm(harness, [i, *DOCUMENT[:40]], namespace, ticket=f"ticket-of-number-{i}")
    told = [outcome(harness, f"ticket-of-number-{i}") for i in range(6)]
    assert told == ["queued", "queued", "busy", "queued", "queued", "busy"]
    assert scheduler.run_all() == 12  # 41 tokens, 20 a pass, four jobs


def test_everybody_who_asked_for_a_prefix_is_told():
    harness, scheduler = cache()
    warm(harness, ticket="ticket-of-the-first")
    warm(harness, ticket="ticket-of-the-second")
    assert scheduler.run_all() == 3
    assert outcome(harness, "ticket-of-the-first") == outcome(harness, "ticket-of-the-second") == "compressed"


def found(harness, tokens) -> int:
    """Tokens that a new request finds in the cache."""
    req = harness.request(tokens)
    assert harness.admit(req)
    num_tokens = req.prefix_len
    harness.prefill(req)
    harness.finish(req)
    return num_tokens


def change_weights(harness) -> None:
    operations.after_flush((True, ""), SimpleNamespace(scheduler=idle_scheduler(MiniScheduler(harness))))
    harness.check()


@pytest.mark.parametrize("splittable", [True, False])
def test_nothing_compressed_is_found_under_other_weights(splittable):
    harness, _ = cache(needs_passes=False, splittable=splittable)
    harness.finish(harness.run([*DOCUMENT, 1]))
    assert found(harness, [*DOCUMENT, 2]) >= (57 if splittable else 0)
    assert harness.tree.spans
    change_weights(harness)
    assert not harness.tree.spans and found(harness, [*DOCUMENT, 3]) == 0


def test_readers_of_compressed_prefixes_run_on_and_then_these_go():
    harness, _ = cache(needs_passes=False)
    harness.finish(harness.run([*DOCUMENT, 1]))
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


def test_a_prefix_of_other_weights_may_be_evicted_before_anybody_lets_go():
    """Its only reader never began, so nobody said that it let go."""
    harness, _ = cache(needs_passes=False)
    harness.finish(harness.run([*DOCUMENT, 1]))
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
    harness, _ = cache(needs_passes=False)
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


def test_a_reader_of_other_weights_that_is_retracted_begins_anew():
    harness, _ = cache(needs_passes=False)
    harness.finish(harness.run([*DOCUMENT, 1]))
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
        harness, _ = cache(needs_passes=False)
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


def test_jobs_and_observations_do_not_survive_other_weights():
    harness, scheduler = cache()
    warm(harness, ticket="the-ticket-of-this")
    half_way = harness.request([9, *DOCUMENT])
    assert harness.admit(half_way) and harness.prefill(half_way, 30)
    scheduler.turn()
    harness.tree.forget_compressed()
    assert outcome(harness, "the-ticket-of-this") == "dropped"
    assert harness.prefill(half_way)
    harness.finish(half_way)
    assert scheduler.run_all() == 0 and not harness.tree.spans


@pytest.mark.parametrize("start", [0, 20])
def test_log_probabilities_of_a_prompt_come_from_its_own_tokens(start):
    """Also in later chunks: the prompt's chunks are not exchanged for the compressed prefix that is cached already."""
    harness, _ = cache(needs_passes=False)
    harness.finish(harness.run([*DOCUMENT, 1]))
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


def test_the_end_of_a_session_that_is_refused_forgets_nothing():
    harness, _ = cache(needs_passes=False)
    harness.finish(harness.run([*DOCUMENT, 1]))
    manager = SimpleNamespace(scheduler=idle_scheduler(MiniScheduler(harness)))
    operations.after_session(EndWeightUpdateReqOutput(success=False, message="no session"), manager)
    assert found(harness, [*DOCUMENT, 2]) >= 57
    operations.after_session(EndWeightUpdateReqOutput(success=True, message=""), manager)
    assert found(harness, [*DOCUMENT, 3]) < 57


def test_a_warm_request_of_which_nothing_can_be_cached_is_too_short():
    """Models with a window or a recurrent state cache prompts at certain places only."""
    harness, _ = cache()
    harness = Harness(num_slots=400, config=harness.config, policy=harness.policy, cache_grid=64)
    warm(harness, DOCUMENT[:40], ticket="ticket-of-a-short-one")
    assert outcome(harness, "ticket-of-a-short-one") == "too-short"
