"""Compressed prefixes on the two pools of a model with sliding-window layers, scenario by scenario."""

from __future__ import annotations

import pytest

from helpers.harness import CONFIG, DOCUMENT
from helpers.two_pools import WINDOW, TwoPoolHarness
from sgl_kvevict.config import KVEvictConfig
from sgl_kvevict.policies.by_name import build_policy
from sgl_kvevict.sglang_adapter.monitoring.server_info import cache_state
from sgl_kvevict.sglang_adapter.window_component import SWA


@pytest.fixture
def harness():
    return TwoPoolHarness()


def segments(harness):
    return sorted({(s.segment.start, s.segment.end) for s in harness.tree.spans.values()})


def windows(harness):
    """Tokens of all nodes that have their window."""
    values = [node.component_data[SWA].value for node in harness.tree.nodes()]
    return sum(len(value) for value in values if value is not None)


def test_full_layers_take_their_budget_and_windows_stay_where_a_prompt_may_go_on(harness):
    harness.finish(harness.run(DOCUMENT))
    assert segments(harness) == [(0, 60)]
    assert cache_state(harness.tree)["span_slots"] == 18  # 0.3 * 60
    assert windows(harness) == WINDOW + 1  # what the prompt's last token saw, and the token
    assert harness.found([*DOCUMENT, 1]) == 60


def test_a_long_prefix_takes_its_budget_in_full_layers_and_a_window_in_the_others():
    """Slots are counted the same for any number of layers and heads; every one of them is accounted for."""
    config = KVEvictConfig(budget=0.2, tail_tokens=64)
    harness = TwoPoolHarness(num_slots=3200, num_window_slots=3100, max_tokens=3200, config=config)
    prompt = [i * 7 % 11 for i in range(3000)]
    harness.finish(harness.run(prompt, chunk=1000))
    assert segments(harness) == [(0, 3000)]
    assert harness.num_slots - harness.allocator.full_available_size() == 600  # 0.2 * 3000
    assert harness.num_window_slots - harness.allocator.swa_available_size() == windows(harness) <= 1000 + WINDOW
    harness.evict_windows(3000)
    assert harness.allocator.swa_available_size() == 3100
    assert segments(harness) == [(0, 3000 - WINDOW)]  # a leaf goes with its window


@pytest.mark.parametrize("policy", [None, build_policy("snapkv", {})])
def test_windows_come_back_although_their_session_ends_with_another_node(policy):
    """The middle of the path goes first, then the session's leaf; only then the beginning belongs to no session."""
    harness = TwoPoolHarness(policy=policy, has_sessions=True)
    for tokens in (DOCUMENT[:3], DOCUMENT[:5], DOCUMENT[:6]):
        req = harness.request(tokens)
        req.session_id, req.session_generation = "first", harness.tree.ensure_session_generation("first")
        assert harness.admit(req) and harness.prefill(req)
        harness.finish(req)
    harness.finish(harness.run([*DOCUMENT[:3], 10]))
    assert windows(harness) == harness.evict_windows(20) == 6


def test_a_window_that_lies_behind_the_compressed_prefix_is_read_from_the_row(harness):
    req = harness.run(DOCUMENT)
    for _ in range(2 * WINDOW):
        harness.decode(req)
    own = harness.rows.req_to_token[req.kv.req_pool_idx, 64:72].long()
    assert harness.tree.window_slots(req, 64, 72).tolist() == harness._paired(own).tolist()
    assert harness.tree.window_slots(req, 60, 60).tolist() == []


def test_a_prompt_that_leaves_a_compressed_prefix_elsewhere_leaves_a_window_there(harness):
    harness.finish(harness.run(DOCUMENT))
    other = DOCUMENT[:30] + [9] * 5
    assert harness.found(other) == 0
    before = harness.allocator.full_available_size()
    harness.finish(harness.run(other))
    # Its own tokens: what it computed again was given back.
    assert harness.allocator.full_available_size() == before - 5
    assert segments(harness) == [(0, 60)]
    assert harness.found(DOCUMENT[:30] + [8] * 9) == 30
    assert harness.found([*DOCUMENT, 1]) == 60


def test_running_requests_go_on_while_the_window_of_their_prefix_is_taken(harness):
    req = harness.run(DOCUMENT)
    for _ in range(WINDOW + 3):
        harness.decode(req)
    assert harness.tree.swa_protected_size() == 0  # its window has moved past the prefix
    harness.evict_windows(100)
    assert windows(harness) == 0 and segments(harness) == [(0, 60)]
    for _ in range(4):
        harness.decode(req)
    harness.finish(req)


def test_a_window_that_reaches_into_blocks_of_the_answer_stays():
    harness = TwoPoolHarness(num_slots=200, config=CONFIG.model_copy(update={"answer_block": 6}))
    req = harness.run(DOCUMENT[:20])
    for _ in range(40):
        assert harness.decode(req)
        harness.turn()
        harness.evict_windows(30)
    assert req.kv.cache_protected_len > 40
    harness.finish(req)
