"""The default policy on a real server and a real model: prefixes shrink when slots are short."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvevict_tools.launcher import LaunchError
from kvevict_tools.measure import flush, plugin_state, wait_until_scored
from sgl_kvevict.client import warm
from sgl_kvevict.distill import weights_folders
from sgl_kvevict.distill.texts import training_texts

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

HANDBOOK = Path(__file__).resolve().parents[2] / "examples" / "data" / "station_handbook.txt"
NEEDLE = "\n\nThe secret word of the station is marigold.\n\n"
QUESTION = (
    "\n\nWhat is the secret word of the station?<|im_end|>\n<|im_start|>assistant\nThe secret word of the station is"
)


def ask(server, text, max_new_tokens=6):
    sampling = {"temperature": 0, "max_new_tokens": max_new_tokens}
    return json.loads(server.post("/generate", {"text": text, "sampling_params": sampling}))


def document_of(part: str) -> str:
    return f"<|im_start|>user\n{part[:2000]}{NEEDLE}{part[2000:]}"


def test_a_prefix_shrinks_when_slots_are_short_and_answers(start, demo_model):
    """Without any pass: nobody has asked about it twice."""
    text = HANDBOOK.read_text()
    document = document_of(text[:4000])
    with start(demo_model, "--max-total-tokens", "1800", config={}) as server:
        assert "kvevict: learned scores of" in server.log()
        ask(server, document)
        state = plugin_state(server)
        assert state["policy"] == "distilled" and state["learned_scores"]["in_use"]
        assert state["span_tokens"] == 0 and state["scoring_jobs"] == 0
        ask(server, "<|im_start|>user\n" + text[4000:8000])
        state = plugin_state(server)
        assert state["span_tokens"] > 800 and state["scoring_jobs"] == 0
        assert state["span_slots"] == -(-state["span_tokens"] // 2)  # the light share
        answer = ask(server, document + QUESTION)
        assert answer["meta_info"]["cached_tokens"] > 800 and "marigold" in answer["text"]
        assert plugin_state(server)["leaked_slots"] == 0 and server.leak_messages() == []


@pytest.fixture(scope="module")
def not_waiting(start, demo_model):
    return start(demo_model, "--max-total-tokens", "6000", config={"wait_for_passes": False})


def test_without_waiting_the_first_request_leaves_a_compressed_prefix(not_waiting):
    server, document = not_waiting, document_of(HANDBOOK.read_text()[:4000])
    ask(server, document)
    state = plugin_state(server)
    assert state["span_tokens"] > 800 and state["scoring_jobs"] == 0
    answer = ask(server, document + QUESTION)
    assert answer["meta_info"]["cached_tokens"] > 800 and "marigold" in answer["text"]
    flush(server)
    assert warm(server.url, text=document).outcome == "compressed"
    assert plugin_state(server)["leaked_slots"] == 0 and server.leak_messages() == []
    flush(server)


def test_an_exact_request_answers_as_without_compression(not_waiting):
    """The compressed prefix is found but not read; other requests go on reading it."""
    server, document = not_waiting, document_of(HANDBOOK.read_text()[:4000])
    sampling = {"temperature": 0, "max_new_tokens": 12}
    first = json.loads(server.post("/generate", {"text": document + QUESTION, "sampling_params": sampling}))
    assert plugin_state(server)["span_tokens"] > 800
    nodes = plugin_state(server)["segments"]
    exact = sampling | {"custom_params": {"kvevict": {"exact": True}}}
    again = json.loads(server.post("/generate", {"text": document + QUESTION, "sampling_params": exact}))
    assert again["meta_info"]["cached_tokens"] == 0 and again["text"].startswith(first["text"][:9])
    assert ask(server, document + QUESTION)["meta_info"]["cached_tokens"] > 800
    assert plugin_state(server)["segments"] == nodes
    assert plugin_state(server)["leaked_slots"] == 0 and server.leak_messages() == []


def test_a_cold_server_learns_from_its_users(start, demo_model):
    """Until then prefixes are compressed by passes, as those of `reconstruction` are; then new ones need none."""
    handbook = document_of(HANDBOOK.read_text()[:4000])
    config = {"score_weights": None, "wait_for_passes": False}
    with start(demo_model, "--max-total-tokens", "6000", config=config) as server:
        assert not plugin_state(server)["learned_scores"]["in_use"]
        learned = right = right_in_full = 0
        for text in training_texts([1200] * 16):
            document = document_of(text)
            ask(server, document + QUESTION)
            answer = ask(server, document + QUESTION)
            right_in_full += "marigold" in answer["text"]
            assert plugin_state(server)["scoring_jobs"] == 1  # passes come for what was asked about twice
            wait_until_scored(server)
            learned += 1
            answer = ask(server, document + QUESTION)
            assert answer["meta_info"]["cached_tokens"] > 256
            right += "marigold" in answer["text"]
            if plugin_state(server)["learned_scores"]["in_use"]:
                break
        assert 9 <= learned <= 16  # eight are learned from, and it is tried on others until it is good enough
        assert right >= 0.8 * right_in_full > 0
        flush(server)
        ask(server, handbook)
        state = plugin_state(server)
        assert state["span_tokens"] > 800 and state["scoring_jobs"] == 0
        assert "marigold" in ask(server, handbook + QUESTION)["text"]
        assert plugin_state(server)["leaked_slots"] == 0 and server.leak_messages() == []


def test_weights_of_another_model_stop_the_server_by_name(start, tiny_llama):
    (known,) = weights_folders()[-1].glob("dfe0d58dc70a1d68.safetensors")
    with pytest.raises(LaunchError) as error:
        start(tiny_llama, "--max-total-tokens", "600", "--skip-tokenizer-init", config={"score_weights": str(known)})
    assert "belong to 'SmolLM2-135M-Instruct', not to" in str(error.value)
