"""Prompts longer than the pool: admitted by their peak, prefilled beside others, and never in each other's way."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sglang.srt.managers.schedule_batch import FINISH_ABORT

from helpers.admission import LongPromptScheduler
from helpers.harness import Harness
from helpers.long_machine import CONFIG
from sgl_kvevict.sglang_adapter.long_prompts import abort_stuck, admission_of, lift_limits
from sgl_kvevict.sglang_adapter.monitoring.server_info import read_gauges
from sgl_kvevict.sglang_adapter.operations import after_details

POOL, CHUNK = 160, 20


def serve(*, chunk: int = CHUNK, pool: int = POOL, **fields) -> LongPromptScheduler:
    config = CONFIG.model_copy(update=fields)
    harness = Harness(num_slots=pool, max_tokens=1024, config=config, waits=True)
    return LongPromptScheduler(harness, chunk)


@pytest.fixture
def scheduler() -> LongPromptScheduler:
    return serve()


def text(num_tokens: int, seed: int = 0) -> list[int]:
    return [(i * i + seed * 3 + i // 7) % 11 for i in range(num_tokens)]


def submit(scheduler: LongPromptScheduler, tokens: list[int], **options):
    req = scheduler.harness.request(tokens, options=options or None)
    assert scheduler.submit(req) is None
    return req


def prefill(scheduler: LongPromptScheduler, req) -> int:
    """Rounds until the first token; at most 200."""
    for count in range(200):
        if req.output_ids:
            return count
        scheduler.round()
    raise AssertionError("the prompt is not served")


def prefilled(scheduler: LongPromptScheduler, tokens: list[int]):
    req = submit(scheduler, tokens)
    prefill(scheduler, req)
    return req


def shrinking(scheduler: LongPromptScheduler, tokens: list[int]):
    """As if it were longer than the pool."""
    req = submit(scheduler, tokens)
    scheduler.tree_cache.prefixes.readers[req].chunk_share = 0.5
    prefill(scheduler, req)
    return req


def cached(scheduler: LongPromptScheduler, tokens: list[int]):
    """Serve a prompt to its end."""
    req = prefilled(scheduler, tokens)
    scheduler.harness.finish(req)
    return req


def told(scheduler: LongPromptScheduler, req) -> dict[str, int] | None:
    """What its client would be told of a request that found nothing."""
    return after_details(None, SimpleNamespace(tree_cache=scheduler.tree_cache), req)


def test_four_times_the_pool_is_served_and_found_again(scheduler):
    tokens = text(4 * POOL)
    first = submit(scheduler, tokens)
    assert prefill(scheduler, first) == 4 * POOL // CHUNK
    compressed = told(scheduler, first)["kvevict_prefilled_compressed"]
    assert compressed > 3 * POOL
    assert scheduler.tree_cache.prefixes.totals.prefilled_compressed == 1
    scheduler.harness.finish(first)
    assert scheduler.found[cached(scheduler, [*tokens, 1, 2])] >= compressed
    assert not scheduler.aborted and scheduler.tree_cache.protected_size() == 0


def test_gauges_say_how_much_of_a_long_prompt_is_computed(scheduler):
    req = submit(scheduler, text(2 * POOL))
    seen = []
    while not req.output_ids:
        scheduler.round()
        gauges = read_gauges(scheduler.tree_cache)
        seen.append((gauges.long_prompt_computed, gauges.long_prompt_tokens))
    assert seen == [(computed, 2 * POOL) for computed in range(CHUNK, 2 * POOL, CHUNK)] + [(0, 0)]
    scheduler.harness.finish(req)


@pytest.mark.parametrize("length", [POOL, 2 * POOL])
def test_chunks_are_smaller_than_those_of_sglang(length):
    scheduler = serve(chunk=300)
    assert prefill(scheduler, submit(scheduler, text(length))) == length // CHUNK


def test_a_prompt_that_fits_is_not_compressed(scheduler):
    req = prefilled(scheduler, text(POOL - 7 - CHUNK))
    assert len(scheduler.tree_cache.spans) == 0 and told(scheduler, req) is None


@pytest.mark.parametrize(("length", "share"), [(2 * POOL, 0.3), (4 * POOL, 0.122)])
def test_chunks_are_compressed_to_what_the_prompt_can_afford_and_at_most_to_the_budget(scheduler, length, share):
    """Each as soon as it is in the tree, although slots are ample; those after them find room."""
    req = submit(scheduler, text(length))
    for done in (1, 2, 3):
        scheduler.round()
        segments = list(scheduler.tree_cache.prefixes.table.packed)
        sizes = [CONFIG.num_slots(CHUNK, number * CHUNK, share) for number in range(done)]
        assert [segment.num_slots for segment in segments] == sizes
    prefill(scheduler, req)
    assert scheduler.tree_cache.prefixes.totals.resizes == 0
    scheduler.harness.finish(req)


@pytest.mark.parametrize("comes_again", [False, True])
def test_a_long_prompt_that_is_retracted_between_two_turns_lets_others_in(scheduler, comes_again):
    """As a pause that retracts does; SGLang forgets then how far its chunks have come."""
    long, other = submit(scheduler, text(3 * POOL)), submit(scheduler, text(30, seed=1))
    for _ in range(3):
        scheduler.round()
    scheduler.harness.retract(long)
    if comes_again:
        scheduler.queue.append(long)
    prefill(scheduler, other)
    if comes_again:
        prefill(scheduler, long)
    assert not scheduler.aborted


def test_two_at_once_are_served_one_after_the_other(scheduler):
    first, second = (submit(scheduler, text(4 * POOL, seed)) for seed in (1, 2))
    prefill(scheduler, first)
    assert not second.kv.holds_kv
    scheduler.round()
    assert not second.kv.holds_kv  # the first one's slots do not leave enough
    scheduler.harness.finish(first)
    prefill(scheduler, second)
    assert not scheduler.aborted


def test_others_are_admitted_after_the_last_chunk(scheduler):
    long, short = submit(scheduler, text(2 * POOL)), submit(scheduler, text(10, 5))
    prefill(scheduler, long)
    scheduler.round()
    assert short.output_ids and short in scheduler.harness.live and long in scheduler.harness.live


def test_it_waits_for_a_request_that_took_its_room_and_goes_on_afterwards(scheduler):
    long = submit(scheduler, text(4 * POOL))
    for _ in range(12):
        scheduler.round()
    tree, harness = scheduler.tree_cache, scheduler.harness
    room = tree.evictable_size() + harness.allocator.available_size()
    other = harness.request(text(room, 9))
    other.sampling_params.max_new_tokens = 1000
    assert harness.admit(other) and harness.prefill(other)
    assert all(scheduler.round() == [] for _ in range(3)) and not scheduler.aborted
    harness.finish(other)
    prefill(scheduler, long)


def test_its_room_is_not_given_to_others(scheduler):
    long = submit(scheduler, text(4 * POOL))
    scheduler.round()
    short = submit(scheduler, text(10, 5))
    while not long.output_ids:
        assert scheduler.round() == [long] and not short.output_ids


def test_one_that_is_stuck_is_aborted_with_an_error(scheduler, monkeypatch):
    monkeypatch.setattr(type(scheduler.tree_cache.compressor), "rank", lambda *_: 1 / 0)
    req = submit(scheduler, text(4 * POOL))
    for _ in range(20):
        scheduler.round()
    assert scheduler.aborted == [req] and "cannot be compressed any further" in req.discard_output_reason.message
    assert isinstance(req.finished_reason, FINISH_ABORT) and scheduler.tree_cache.protected_size() == 0
    prefilled(scheduler, text(30, 3))


def test_a_turn_that_tries_no_chunk_aborts_nobody(scheduler):
    """An earlier turn found no room, beside requests that have gone since."""
    req = submit(scheduler, text(2 * POOL))
    scheduler.round()
    admission = admission_of(scheduler.token_to_kv_pool_allocator)
    idle = SimpleNamespace(batch_to_run=None, running_batch=SimpleNamespace(is_empty=lambda: True))
    beside = SimpleNamespace(batch_to_run=None, running_batch=SimpleNamespace(is_empty=lambda: False))
    admission.is_parked = True
    abort_stuck(beside, scheduler)
    abort_stuck(idle, scheduler)
    assert scheduler._pending_chunked_abort_req is None
    prefill(scheduler, req)
    assert not scheduler.aborted


@pytest.mark.parametrize("ends", ["retract", "abort"])
def test_chunks_of_one_that_stops_in_the_middle_are_found_again(scheduler, ends):
    tokens = text(4 * POOL)
    req = submit(scheduler, tokens)
    for _ in range(16):
        scheduler.round()
    getattr(scheduler.harness, ends)(req)
    if ends == "retract":
        scheduler.queue.append(req)
    else:
        req = submit(scheduler, tokens)
    assert prefill(scheduler, req) == (4 * POOL - 16 * CHUNK) // CHUNK and scheduler.found[req] == 16 * CHUNK


def test_a_cached_prefix_that_fills_the_pool_does_not_keep_a_longer_prompt_out(scheduler):
    tokens = text(4 * POOL)
    cached(scheduler, tokens[:140])
    long = prefilled(scheduler, tokens)
    assert scheduler.found[long] == 140


def test_beside_readers_of_a_prefix_of_old_weights_that_begins_like_it_it_is_computed_anew():
    scheduler = serve()
    tokens = text(4 * POOL)
    reader = shrinking(scheduler, tokens[:80])
    scheduler.tree_cache.forget_compressed()
    long = submit(scheduler, tokens)
    for _ in range(3):
        scheduler.round()
    scheduler.harness.finish(reader)
    prefill(scheduler, long)
    assert scheduler.found[long] == 0 and not scheduler.aborted


def test_branching_off_inside_one_finds_its_compressed_tokens(scheduler):
    tokens = text(4 * POOL)
    cached(scheduler, tokens)
    branch = prefilled(scheduler, [*tokens[: 2 * POOL + 3], 1, 2, 3])
    assert scheduler.found[branch] == 2 * POOL + 3


def test_a_branch_that_ends_where_the_other_does_reads_its_own_segment():
    """Both have five spans up to token 100, of which they share the first: a prefill checks what it reads."""
    scheduler, tokens = serve(pool=1000), text(101)
    shrinking(scheduler, tokens)
    branch = shrinking(scheduler, tokens[:CHUNK] + [10 - token for token in text(81, 3)])
    assert scheduler.found[branch] == CHUNK


def test_what_cannot_be_served_is_refused_with_the_numbers(scheduler):
    longest = scheduler.plan.longest()
    assert longest > 4 * POOL
    harness = scheduler.harness
    too_long = scheduler.submit(harness.request(text(longest + 1)))
    assert f"got {longest + 1} tokens, more than the pool's {POOL} token slots; allowed: at most {longest}" in too_long
    share = scheduler.plan.affordable_share(longest + 1, 1)
    assert f"min_budget {share} would do" in too_long and 0 < share < 0.1
    assert "no min_budget would do" in scheduler.submit(harness.request(text(3 * longest)))
    exact = harness.request(text(2 * POOL))
    scheduler.tree_cache.prefixes.readers[exact].is_exact = True
    assert f"with exact; allowed: at most {POOL - 7}" in scheduler.submit(exact)
    uncached = harness.uncached_request(text(2 * POOL))
    assert f'with bootstrap_host "2.2.2.2"; allowed: at most {POOL - 7}, because' in scheduler.submit(uncached)
    uncached.positional_embed_overrides = object()
    assert f"with positional_embed_overrides; allowed: at most {POOL - 7}," in scheduler.submit(uncached)
    assert scheduler.tree_cache.prefixes.readers[uncached].chunk_share is None and scheduler.queue == []
    with_logprobs = harness.request(text(2 * POOL))
    with_logprobs.return_logprob, with_logprobs.logprob_start_len = True, 0
    room = POOL - 2 - 8 - scheduler.plan.slots_at_peak(2 * POOL)
    assert f"with logprob_start_len 0; allowed: at least {2 * POOL - room}," in scheduler.submit(with_logprobs)


def test_prompts_that_are_never_cached_are_served_beside_others_and_leave_nothing(scheduler):
    """Twenty of most of the pool, some retracted in the middle, beside one that is longer than the pool."""
    harness = scheduler.harness
    cached(scheduler, text(2 * POOL))
    for seed in range(20):
        req = harness.uncached_request(text(POOL - 40 - seed, seed + 1))
        assert scheduler.submit(req) is None
        for _ in range(seed % 3):
            scheduler.round()
        if req in harness.live and seed % 2:
            harness.retract(req)
            scheduler.chunked_req = None
            scheduler.queue.insert(0, req)
        prefill(scheduler, req)
        assert harness.tree.prefixes.readers[req].observation is None
        harness.decode(req)
        harness.finish(req)
    assert not scheduler.aborted and not any(harness.tree.guard.errors.values())
    assert harness.allocator.available_size() + harness.tree.evictable_size() == POOL
    prefilled(scheduler, text(2 * POOL))


def test_tokens_with_log_probabilities_stay_out_of_the_cache_until_the_prompt_is_complete(scheduler):
    req = scheduler.harness.request(text(2 * POOL))
    room = POOL - 2 - 8 - scheduler.plan.slots_at_peak(2 * POOL)
    req.return_logprob, req.logprob_start_len = True, 2 * POOL - room
    assert room > CHUNK and scheduler.submit(req) is None
    prefill(scheduler, req)
    compressed = told(scheduler, req)["kvevict_prefilled_compressed"]
    assert POOL < compressed <= 2 * POOL - room and not scheduler.aborted


def test_an_answer_has_the_room_that_the_prompt_leaves_at_its_peak(scheduler):
    req = scheduler.harness.request(text(4 * POOL))
    req.sampling_params.max_new_tokens = 10_000
    assert scheduler.submit(req) is None
    peak = scheduler.plan.slots_at_peak(4 * POOL)
    assert req.sampling_params.max_new_tokens == POOL - peak - 2
    prefill(scheduler, req)
    while len(req.output_ids) < req.sampling_params.max_new_tokens:
        assert scheduler.harness.decode(req)


def lifted(monkeypatch, harness: Harness, *, truncates: bool = False, chunk: int | None = 100, spec: bool = False):
    """A scheduler whose model has a context of 1,000 tokens, after its start."""
    monkeypatch.setattr(
        "sgl_kvevict.sglang_adapter.long_prompts.published", {"allow_auto_truncate": truncates}.__getitem__
    )
    scheduler = SimpleNamespace(
        tree_cache=harness.tree,
        token_to_kv_pool_allocator=harness.allocator,
        chunked_prefill_size=chunk,
        spec_algorithm=SimpleNamespace(is_none=lambda: not spec),
        model_config=SimpleNamespace(context_len=1000),
        max_req_len=POOL - 1,
        max_req_input_len=POOL - 6,
    )
    lift_limits(scheduler)
    return scheduler


def test_limits_are_lifted_and_a_large_chunk_is_named(monkeypatch, caplog):
    scheduler = lifted(monkeypatch, Harness(num_slots=POOL, config=CONFIG))
    assert (scheduler.max_req_len, scheduler.max_req_input_len) == (999, 994)
    admission = admission_of(scheduler.token_to_kv_pool_allocator)
    assert admission.limit == POOL - 6 and admission.plan.chunk == POOL // 8
    (warning,) = [each.message for each in caplog.records if each.levelname == "WARNING"]
    assert "--chunked-prefill-size is 100" in warning and "at most 20 tokens" in warning


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"policy": None}, {}),
        ({"config": CONFIG.model_copy(update={"budget": 1.0})}, {}),
        ({"windows": (5, 0)}, {}),
        ({}, {"truncates": True}),
        ({}, {"chunk": None}),
        ({}, {"spec": True}),
    ],
)
def test_stock_s_limit_stays_where_chunks_cannot_shrink(monkeypatch, fields, options):
    scheduler = lifted(monkeypatch, Harness(**{"num_slots": POOL, "config": CONFIG, **fields}), **options)
    assert (scheduler.max_req_len, scheduler.max_req_input_len) == (POOL - 1, POOL - 6)
    assert admission_of(scheduler.token_to_kv_pool_allocator) is None


@pytest.mark.parametrize("shared", [10, 100])
def test_a_prompt_that_fills_the_pool_gets_the_rest_of_a_segment_that_it_begins_like(shared):
    """Its lock takes the segment's slots, those of the tokens below it too: 41 of 160, and it would wait for ever."""
    scheduler = serve(chunk=1000)
    document = text(140)
    cached(scheduler, document)
    again = submit(scheduler, document[:shared] + [10 - token for token in text(151 - shared, 5)])
    assert prefill(scheduler, again) == 1 and scheduler.found[again] == shared
    scheduler.harness.finish(again)


def test_what_others_read_of_such_a_segment_stays():
    scheduler = serve(chunk=1000)
    document = text(140)
    cached(scheduler, document)
    reader = prefilled(scheduler, [*document, 3])
    waiting = submit(scheduler, document[:10] + [10 - token for token in text(141, 5)])
    for _ in range(3):
        assert scheduler.round() == []
    assert reader in scheduler.harness.live
    scheduler.harness.finish(reader)
    assert prefill(scheduler, waiting) == 1
