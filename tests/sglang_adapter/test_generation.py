"""What requests generate is compressed while they do: who owns which slots at every transition."""

from __future__ import annotations

import math

import pytest

from helpers.harness import Harness
from helpers.own_policies import OWN_POLICIES
from helpers.settings import refused, settings
from sgl_kvevict.cache.generation import NoGenerations
from sgl_kvevict.config import KVEvictConfig
from sgl_kvevict.policies import build_policy
from sgl_kvevict.sglang_adapter.monitoring.server_info import cache_state

PROMPT = [i * 7 % 11 for i in range(40)]
POLICIES = ("h2o", "streaming-llm", "snapkv")
BLOCK, TAIL = 8, 4


def make(policy="h2o", budget=0.25, num_slots=400, block=BLOCK, cache_grid=1, **fields):
    config = KVEvictConfig(
        policy=policy,
        budget=budget,
        tail_tokens=TAIL,
        sink_tokens=2,
        min_prefix_tokens=6,
        decode_block=block,
        policy_options={"window_size": 4} if policy == "snapkv" else {},
        **fields,
    )
    policy = build_policy(policy, config.policy_options)
    return Harness(num_slots=num_slots, config=config, policy=policy, cache_grid=cache_grid)


def start(harness, tokens=PROMPT, max_new_tokens=10_000, **options):
    req = harness.request(list(tokens), **options)
    req.sampling_params.max_new_tokens = max_new_tokens
    assert harness.admit(req)
    assert harness.prefill(req)
    return req


def generate(harness, req, steps):
    for _ in range(steps):
        assert harness.decode(req)
        harness.turn()


def held(harness):
    return harness.num_slots - harness.allocator.available_size()


def generated_segments(harness):
    return {span.segment for span in harness.tree.spans.values() if span.segment.is_generated}


@pytest.mark.parametrize("policy", POLICIES)
def test_slots_come_back_while_a_request_runs(policy):
    harness = make(policy)
    req = start(harness)
    prompt = held(harness)
    for done in range(1, 201):
        generate(harness, req, 1)
        assert held(harness) <= prompt + math.ceil(0.25 * done) + BLOCK + TAIL
    assert len(generated_segments(harness)) == 1
    harness.finish(req)
    assert cache_state(harness.tree)["leaked_slots"] == 0


def test_entries_per_head_are_a_cap_however_long_an_answer_is():
    harness = make("h2o", budget=12)
    req = start(harness)
    prompt = held(harness)
    for _ in range(200):
        generate(harness, req, 1)
        assert held(harness) <= prompt + 12 + BLOCK + TAIL
    harness.finish(req)


def test_a_request_outgrows_the_pool_without_being_retracted():
    harness = make("h2o", num_slots=110)
    req = start(harness)
    generate(harness, req, 200)  # 240 tokens
    assert req in harness.live


def test_the_segment_of_an_answer_is_read_as_one():
    harness = make()
    req = start(harness)
    generate(harness, req, 100)
    (path,) = harness.tree.read_paths([req])
    assert len(path) == 3  # prompt, its tail, answer
    again = harness.tree.read_paths([req])[0]
    assert all(one is other for one, other in zip(path, again, strict=True))


def test_the_next_turn_finds_the_compressed_answer():
    harness = make()
    req = start(harness)
    generate(harness, req, 60)
    answered = list(req.origin_input_ids) + list(req.output_ids)
    harness.finish(req)
    slots = held(harness)
    assert slots < 60
    turn = harness.request([*answered, 1, 2, 3])
    turn.sampling_params.max_new_tokens = 10_000
    assert harness.admit(turn) and turn.prefix_len == len(answered) - 1
    harness.prefill(turn)
    generate(harness, turn, 60)
    assert len(generated_segments(harness)) == 2
    harness.finish(turn)


@pytest.mark.parametrize("steps", [1, BLOCK, BLOCK + TAIL - 1, BLOCK + TAIL, BLOCK + TAIL + 1, 60])
@pytest.mark.parametrize("end", ["finish", "retract", "abort"])
def test_a_request_may_end_at_any_time(steps, end):
    harness = make()
    req = start(harness)
    generate(harness, req, steps)
    getattr(harness, end)(req)
    assert not harness.tree.prefixes.generations._suffixes()
    assert harness.tree.protected_size() == 0
    harness.evict(harness.num_slots)
    assert harness.allocator.available_size() == harness.num_slots


def test_a_retracted_request_goes_on_with_what_it_had():
    harness = make()
    req = start(harness)
    generate(harness, req, 50)
    harness.retract(req)
    assert harness.admit(req)
    assert req.prefix_len == 80  # five blocks
    harness.prefill(req)
    generate(harness, req, 50)
    assert len(generated_segments(harness)) == 2
    harness.finish(req)


def test_what_is_dropped_while_a_retracted_request_waits_is_computed_again():
    harness = make()
    req = start(harness)
    generate(harness, req, 50)
    harness.retract(req)
    harness.evict(harness.num_slots)
    assert harness.admit(req) and req.prefix_len == 0
    harness.prefill(req)
    generate(harness, req, 30)
    harness.finish(req)


def test_twins_share_what_the_first_of_them_compressed():
    harness = make()
    twins = [start(harness), start(harness)]
    for _ in range(60):
        for req in twins:
            assert harness.decode(req)
        harness.turn()
    first, second = harness.tree.read_paths(twins)
    assert first[0] is second[0] and held(harness) < 40 + 60
    for req in twins:
        harness.finish(req)


def test_an_answer_that_others_extend_stays_as_it_is():
    harness = make()
    req = start(harness)
    generate(harness, req, 40)
    (segment,) = generated_segments(harness)
    answered = list(req.origin_input_ids) + list(req.output_ids)
    other = start(harness, [*answered[: segment.end - 3], 9, 9, 9, 9])
    generate(harness, req, 30)
    assert segment in generated_segments(harness) and len(generated_segments(harness)) == 2
    harness.decode(other)
    harness.finish(other)
    generate(harness, req, 30)
    harness.finish(req)


def test_what_reads_exactly_is_not_compressed():
    harness = make()
    req = harness.request(PROMPT)
    req.sampling_params.max_new_tokens = 10_000
    harness.tree.prefixes.readers[req].is_exact = True
    assert harness.admit(req)
    harness.prefill(req)
    generate(harness, req, 60)
    assert not harness.tree.spans
    other = start(harness)  # has to wait for the exact one with its prompt, and with what comes behind it
    generate(harness, other, 30)
    assert not harness.tree.spans
    harness.finish(req)
    generate(harness, other, 1)
    assert len(generated_segments(harness)) == 1
    harness.finish(other)


def test_short_prompts_are_kept_whole():
    harness = make()
    req = start(harness, [1, 2, 3])
    generate(harness, req, 40)
    spans = sorted((span.start, span.end, span.segment.num_slots) for span in harness.tree.spans.values())
    assert spans[0] == (0, 3, 3)
    harness.finish(req)


def test_a_prompt_of_which_nothing_is_cached():
    """It ends before the first place where the tree may hold it; what follows is compressed all the same."""
    harness = make(cache_grid=4)
    req = start(harness, [3])
    generate(harness, req, 5 * BLOCK)
    assert not any(harness.tree.guard.errors.values())
    assert held(harness) < 5 * BLOCK
    harness.finish(req)


def test_requests_go_on_uncompressed_after_new_weights():
    harness = make()
    req = start(harness)
    generate(harness, req, 30)
    harness.tree.forget_compressed()
    generate(harness, req, 30)
    harness.finish(req)
    assert not harness.tree.spans  # nobody reads them any more


def test_with_a_budget_of_one_everything_is_kept():
    harness = make(budget=1.0)
    req = start(harness)
    generate(harness, req, 60)
    assert held(harness) == 40 + 60
    (segment,) = generated_segments(harness)
    assert segment.num_slots == segment.end - segment.start
    harness.finish(req)


def test_a_policy_that_fails_leaves_the_request_alone(monkeypatch):
    harness = make()
    req = start(harness)
    generate(harness, req, 20)

    def fail(*_args, **_kwargs):
        raise RuntimeError("no")

    monkeypatch.setattr("sgl_kvevict.segments.generated.choose_generated", fail)
    generate(harness, req, 30)
    assert sum(harness.tree.guard.errors.values()) == 1
    harness.finish(req)
    harness.evict(harness.num_slots)
    assert harness.allocator.available_size() == harness.num_slots


def test_requests_without_a_lane_are_followed_when_one_is_free():
    harness = make(observation_bytes=0)  # one lane
    first, second = start(harness), start(harness, PROMPT[::-1])
    for _ in range(40):
        for req in (first, second):
            assert harness.decode(req)
        harness.turn()
    assert len(generated_segments(harness)) == 1
    harness.finish(first)
    generate(harness, second, 40)
    assert len(generated_segments(harness)) == 2
    harness.finish(second)


def test_what_cannot_be_done_while_requests_generate_is_refused():
    config, policy = KVEvictConfig(policy="h2o", decode_block=8), build_policy("h2o", {})
    strips = settings(strips_thinking=True)
    assert refused(config, policy) == refused(KVEvictConfig(policy="h2o"), policy, strips) == []
    (reason,) = refused(config, policy, strips)
    assert "--strip-thinking-cache" in reason
    (reason,) = refused(config, policy, decode_graphs="full")
    assert "--cuda-graph-backend-decode disabled" in reason
    assert refused(config, build_policy("streaming-llm", {}), decode_graphs="full") == []
    assert refused(config, policy, decode_graphs="full", device="cpu", chosen="numba") == []


def test_off_by_default():
    harness = make(block=None)
    req = start(harness)
    generate(harness, req, 60)
    assert type(harness.tree.prefixes.generations) is NoGenerations and not generated_segments(harness)
    harness.finish(req)


def test_what_is_left_of_a_segment_ends_where_its_last_view_does():
    """Entries of tokens that were dropped stay until that saves a slot; nobody reads them."""
    num_seen = 0
    for num_dropped in range(1, BLOCK):
        harness = make(OWN_POLICIES["knorm"], budget=6)  # a policy that keeps no order of tokens
        req = start(harness)
        generate(harness, req, 100)
        harness.retract(req)
        (last,) = [node for node in harness.tree.spans if not node.children]
        tokens = [*req.origin_input_ids, *req.output_ids]
        end = harness.tree.spans[last].end
        other = harness.run([*tokens[: end - num_dropped], 77])  # cuts the last block
        harness.retract(other)
        harness.tree._blocking.drop_subtree(last)
        left = [span for span in harness.tree.spans.values() if span.segment.is_generated]
        num_seen += max(span.end for span in left) < left[-1].segment.end
        assert harness.admit(req) and harness.prefill(req)
    assert num_seen  # there were entries that nobody may read


def test_an_answer_is_not_begun_anew_by_a_step_beside_other_requests_prefills():
    """SGLang's mixed chunks: the plan of such a batch sees a decode step as a prefill of one token."""
    harness = make("streaming-llm")
    req = start(harness, [1, 2, 3])  # too short to be observed
    for _ in range(5):
        assert harness.decode(req)
        end = req.kv.kv_allocated_len
        harness.tree.observe(req, end - 1, end)
    assert harness.tree.prefixes.readers[req].suffix.start == 3
