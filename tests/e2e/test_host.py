"""A real server whose pool holds a fraction of what it is asked about: what was dropped is found again."""

from __future__ import annotations

import pytest

from helpers.modes import assert_nothing_leaked
from helpers.traffic import generate, idle_state, numbers
from kvevict_tools.launcher import FLOAT32_FLAGS, LaunchError

FLAGS = ("--skip-tokenizer-init", "--max-total-tokens", "1000", "--context-length", "1024", *FLOAT32_FLAGS)
CONFIG = {"policy": "snapkv", "min_prefix_tokens": 48, "tail_tokens": 16, "policy_options": {"window_size": 16}}
TOKENS = 400


@pytest.fixture(scope="module")
def server(start, tiny_llama):
    return start(tiny_llama, *FLAGS, config=CONFIG)


def ask(server, document: list[int]) -> tuple[list[int], int]:
    """What is generated for a question, and how many tokens of the prompt were found."""
    reply = generate(server, document + numbers(99, 16), 12)
    return reply["output_ids"], reply["meta_info"]["cached_tokens"]


def test_what_was_dropped_is_found_again_with_the_same_answers(server):
    documents = [numbers(seed, TOKENS) for seed in range(20)]  # eight times the pool
    for document in documents:
        generate(server, document + numbers(98, 16), 1)
    first = [ask(server, document) for document in documents]
    state = idle_state(server)
    assert state["dropped_spans"] > 0 and state["moved_out_segments"] > 0
    assert 0 < state["host_used_bytes"] <= state["host_bytes"] and state["host_segments"] > 0
    again = [ask(server, document) for document in documents]
    assert again == first and all(cached == TOKENS for _, cached in first)
    after = idle_state(server)
    assert after["compressions"] == state["compressions"]  # none was computed again
    assert after["moved_in_segments"] > state["moved_in_segments"] and not any(after["errors"].values())
    assert_nothing_leaked(server)


def hinted(server, seed: int, hint: dict | None = None, num_new: int = 2) -> dict[str, int]:
    """What a client is told whose request gives a hint."""
    told = generate(server, numbers(seed, TOKENS) + numbers(98, 16), num_new, {"kvevict": hint})["meta_info"]
    details = told["cached_tokens_details"] or {"device": 0, "host": 0}
    assert details["device"] + details["host"] == told["cached_tokens"] and "storage" not in details
    return details


def test_what_is_retained_is_found_and_what_is_fetched_is_there(server):
    hinted(server, 40, {"retain": 600})
    hinted(server, 41)
    for seed in range(50, 66):  # push others out
        hinted(server, seed)
    told = hinted(server, 40)
    assert told["device"] + told["host"] >= TOKENS
    # Fetched before it is asked about: all but the last token, which SGLang computes.
    assert hinted(server, 41, num_new=0)["host"] == TOKENS + 15
    assert hinted(server, 41)["device"] >= TOKENS
    assert_nothing_leaked(server)


def test_a_flush_empties_it(server):
    server.post("/flush_cache?timeout=60")
    state = idle_state(server)
    assert state["host_segments"] == state["host_used_bytes"] == 0 and state["free_slots"] == 1000
    assert ask(server, numbers(1, TOKENS))[1] == 0


def test_sizes_that_the_machine_does_not_have_are_refused(start, tiny_llama):
    for size in (1, 10**15):
        with pytest.raises(LaunchError, match=rf"host_bytes: got {size}; allowed here: 0 \(off\), or \d+ to \d+"):
            start(tiny_llama, *FLAGS, config=CONFIG | {"host_bytes": size})
