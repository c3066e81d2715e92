"""Compressed prefixes beside the states of recurrent layers, scenario by scenario."""

from __future__ import annotations

import pytest

from helpers.harness import DOCUMENT
from helpers.states import StatesHarness
from sgl_kvevict.cache.nodes import path_to
from sgl_kvevict.config import KVEvictConfig
from sgl_kvevict.sglang_adapter.kv_pools import MAMBA
from sgl_kvevict.sglang_adapter.monitoring.server_info import cache_state


def states(harness):
    """Logical positions at which the tree has states."""
    nodes = [node for node in harness.tree.nodes() if node.component_data[MAMBA].value is not None]
    return sorted(sum(len(above.key) for above in path_to(node)) for node in nodes)


def test_a_span_ends_at_the_state_and_prompts_are_found_at_the_state():
    harness = StatesHarness()
    req = harness.run(DOCUMENT)
    assert cache_state(harness.tree)["span_slots"] == 18  # 0.3 * 60
    harness.decode(req)
    harness.finish(req)
    assert states(harness) == [60, 61]
    assert harness.found([*DOCUMENT, 9, 9]) == 60
    assert harness.found([*DOCUMENT[:56], 9, 9]) == 0  # inside a span is no place to go on


def test_a_prompt_that_leaves_elsewhere_computes_again_and_shares_the_span():
    harness = StatesHarness()
    harness.finish(harness.run(DOCUMENT))
    free = harness.allocator.available_size()
    other = harness.run(DOCUMENT[:30] + [9] * 5)
    harness.finish(other)
    assert harness.allocator.available_size() == free - 5
    assert states(harness) == [35, 60]
    assert harness.found(DOCUMENT[:30] + [9] * 5 + [1]) == 35


def test_taking_a_state_away_leaves_the_compressed_prefix_to_others():
    harness = StatesHarness()
    harness.finish(harness.run(DOCUMENT))
    longer = harness.run([*DOCUMENT, 1, 2, 3])
    harness.finish(longer)
    harness.evict_states(1)
    assert states(harness) == [63]
    assert harness.found([*DOCUMENT, 1, 2, 3, 4]) == 63
    assert harness.found([*DOCUMENT, 5]) == 0


def test_what_is_below_no_state_goes_first():
    config = KVEvictConfig(budget=0.3, min_budget=0.3, tail_tokens=4, sink_tokens=2, min_prefix_tokens=6)
    harness = StatesHarness(num_slots=200, config=config)
    other = [9, *DOCUMENT[1:]]
    for tokens in (DOCUMENT, [*DOCUMENT, 1, 2, 3, 4], other):
        harness.finish(harness.run(tokens))
    harness.evict_states(1)
    assert states(harness) == [60, 64]
    assert harness.evict(1) == 4  # the older prompt's question, and its state with it
    assert (harness.found([*DOCUMENT, 1]), harness.found([*other, 1])) == (0, 60)
    assert harness.evict(1) == 18  # nobody finds its span any more, although it was looked for last
    assert harness.found([*other, 1]) == 60


def test_a_state_counts_as_the_slots_that_its_memory_would_make():
    harness = StatesHarness(num_slots=200)
    harness.finish(harness.run(DOCUMENT))
    order = harness.tree.prefixes.recency
    (leaf,) = (node for node in harness.tree.nodes() if node.component_data[MAMBA].value is not None)
    state_bytes = 2 * 4 * (1 * 2 * 2 + 2 * 3)  # layers, bytes, numbers of both parts
    slot_bytes = 2 * 2 * 4 * (2 * 2)  # layers, keys and values, bytes, heads and their width
    assert order.get_priority(leaf)[0] == pytest.approx(60 / (18 + state_bytes / slot_bytes))
    harness.finish(harness.run(DOCUMENT[:30] + [9] * 5))  # cuts the node: the upper half has no state
    assert order.get_priority(leaf.parent)[0] == 0
