"""Passes on a real server and a real model: prefixes are scored by requests of our own, and still answer."""

from __future__ import annotations

import json
import urllib.error
from pathlib import Path

import pytest

from kvevict_tools.measure import plugin_state, wait_until_scored
from sgl_kvevict.client import WarmError, warm

HANDBOOK = Path(__file__).resolve().parents[2] / "examples" / "data" / "station_handbook.txt"
NEEDLE = "\n\nThe secret word of the station is marigold.\n\n"
QUESTION = (
    "\n\nWhat is the secret word of the station?<|im_end|>\n<|im_start|>assistant\nThe secret word of the station is"
)
BUDGET = 0.2


def document(first: int) -> str:
    """About 900 tokens of prose with a fact in the middle."""
    text = HANDBOOK.read_text()[first : first + 4000]
    return f"<|im_start|>user\n{text[:2000]}{NEEDLE}{text[2000:]}"


def ask(server, text, max_new_tokens=6):
    sampling = {"temperature": 0, "max_new_tokens": max_new_tokens}
    return json.loads(server.post("/generate", {"text": text, "sampling_params": sampling}))


@pytest.fixture(scope="module")
def server(start, demo_model):
    config = {"policy": "reconstruction", "budget": BUDGET}
    return start(demo_model, "--max-total-tokens", "6000", config=config, spins=True)


def test_a_warmed_prefix_is_compressed_and_still_answers(server):
    warmed = warm(server.url, text=document(0))
    assert warmed.outcome == "compressed"
    state = plugin_state(server)
    assert state["span_tokens"] == warmed.tokens - 32
    assert state["span_slots"] == -(-2 * (warmed.tokens - 32) // 10)
    answer = ask(server, document(0) + QUESTION)
    assert answer["meta_info"]["cached_tokens"] == warmed.tokens
    assert "marigold" in answer["text"]
    assert warm(server.url, text=document(0)).outcome == "compressed"  # before


def test_a_prefix_found_by_a_second_request_is_scored_by_itself(server):
    server.post("/flush_cache?timeout=60")
    for suffix in ("\n\nWho?", "\n\nWhere?"):
        ask(server, document(0) + suffix)
    wait_until_scored(server)
    assert plugin_state(server)["span_tokens"] > 700
    answer = ask(server, document(0) + QUESTION)
    assert answer["meta_info"]["cached_tokens"] > 800
    assert "marigold" in answer["text"]


def test_a_chat_can_be_warmed_with_the_questions_that_will_come(server):
    messages = [{"role": "user", "content": document(9000).removeprefix("<|im_start|>user\n")}]
    warmed = warm(server.url, messages=messages, questions=["\n\nWhat is the secret word of the station?"])
    assert warmed.outcome == "compressed"
    state = plugin_state(server)
    assert state["leaked_slots"] == 0 and server.leak_messages() == []


def test_impossible_wishes_are_answered_with_status_400(server):
    sampling = {"max_new_tokens": 1, "custom_params": {"kvevict": {"worm": True}}}
    with pytest.raises(urllib.error.HTTPError) as error:
        server.post("/generate", {"text": "Hello", "sampling_params": sampling})
    assert error.value.code == 400 and "custom_params.kvevict.worm: got true" in error.value.read().decode()
    with pytest.raises(WarmError, match="Connection refused"):
        warm("http://127.0.0.1:9", text="Hello")
