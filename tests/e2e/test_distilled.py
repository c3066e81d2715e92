"""The default policy on real servers: scores known before the first request; when prefixes are compressed."""

from __future__ import annotations

import json
import random
import secrets
import shutil
from pathlib import Path

import pytest
from safetensors import safe_open

from helpers.tiny_model import save_tiny_llama
from helpers.traffic import generate, idle_state
from kvevict_tools.launcher import FLOAT32_FLAGS, LaunchError
from kvevict_tools.measure import flush, plugin_state
from sgl_kvevict.client import warm

HANDBOOK = Path(__file__).resolve().parents[2] / "examples" / "data" / "station_handbook.txt"
NEEDLE = "\n\nThe secret word of the station is marigold.\n\n"
QUESTION = (
    "\n\nWhat is the secret word of the station?<|im_end|>\n<|im_start|>assistant\nThe secret word of the station is"
)


def ask(server, text, max_new_tokens=6, **options):
    sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "custom_params": {"kvevict": options or None}}
    return json.loads(server.post("/generate", {"text": text, "sampling_params": sampling}))


def document_of(part: str) -> str:
    return f"<|im_start|>user\n{part[:2000]}{NEEDLE}{part[2000:]}"


def test_a_prefix_shrinks_when_slots_are_short_and_answers(start, demo_model):
    """With ``compress: when short`` answers are those of the uncompressed cache until then."""
    text = HANDBOOK.read_text()
    document = document_of(text[:4000])
    with start(demo_model, "--max-total-tokens", "1800", config={"policy": "none"}) as server:
        full = [ask(server, prompt, 16)["output_ids"] for prompt in (document, document + QUESTION)]
    with start(demo_model, "--max-total-tokens", "1800", config={"compress": "when short"}) as server:
        assert "kvevict: learned scores of" in server.log()
        assert [ask(server, prompt, 16)["output_ids"] for prompt in (document, document + QUESTION)] == full
        state = plugin_state(server)
        assert state["policy"] == "distilled" and state["learned_scores"]["texts"] == 16
        assert state["compress"] == "when short" and state["span_tokens"] == 0
        ask(server, "<|im_start|>user\n" + text[4000:8000])
        state = plugin_state(server)
        assert state["span_tokens"] > 800
        # The budget, behind the three tokens that the running request has in common with it.
        assert state["span_slots"] == 3 + -(-(state["span_tokens"] - 3) // 5)
        answer = ask(server, document + QUESTION)
        assert answer["meta_info"]["cached_tokens"] > 800 and "marigold" in answer["text"]
        assert plugin_state(server)["leaked_slots"] == 0 and server.leak_messages() == []


@pytest.fixture(scope="module")
def not_waiting(start, demo_model):
    return start(demo_model, "--max-total-tokens", "6000", config={})


def test_the_first_request_leaves_a_compressed_prefix(not_waiting):
    server, document = not_waiting, document_of(HANDBOOK.read_text()[:4000])
    ask(server, document)
    state = plugin_state(server)
    assert state["span_tokens"] > 800
    answer = ask(server, document + QUESTION)
    assert answer["meta_info"]["cached_tokens"] > 800 and "marigold" in answer["text"]
    flush(server)
    assert warm(server.url, text=document).device == 0
    assert warm(server.url, text=document).device > 800
    assert plugin_state(server)["leaked_slots"] == 0 and server.leak_messages() == []
    flush(server)


def learned(server) -> dict:
    return plugin_state(server)["learned_scores"]


TINY = ("--skip-tokenizer-init", "--max-total-tokens", "2000", "--context-length", "1024")


@pytest.fixture(scope="module")
def novice(tmp_path_factory) -> Path:
    """A model that no test has learned the scores of."""
    return save_tiny_llama(tmp_path_factory.mktemp("novice"), seed=secrets.randbits(32))


def test_scores_are_learned_before_the_port_opens_and_once(start, novice, tmp_path):
    path = tmp_path / "new" / "scores.safetensors"
    config = {"score_weights": str(path)}
    with start(novice, *TINY, config=config) as server:
        log = server.log()
        assert log.index("learning scores: text 16 of 16") < log.index("learned scores find") < log.index("Uvicorn")
        recall = learned(server)["recall"]
        assert learned(server)["texts"] == 16 and 0 < recall <= 1
        state = idle_state(server)
        assert state["segments"] == 0 and state["leaked_slots"] == 0 and state["errors"] == {}
        tokens = random.Random(0).choices(range(3, 500), k=600)
        for _ in range(2):
            generate(server, tokens, 4)
        assert idle_state(server)["span_tokens"] > 500 and server.leak_messages() == []
    with start(novice, *TINY, config=config) as server:
        assert "learning scores" not in server.log() and learned(server)["recall"] == recall


def test_ranks_learn_their_own_heads_and_one_file_has_all(start, novice, tmp_path):
    path = tmp_path / "scores.safetensors"
    ranks = ("--tp-size", "2", *FLOAT32_FLAGS)
    env = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    with start(novice, *TINY, *ranks, config={"score_weights": str(path)}, env=env) as server:
        assert learned(server)["texts"] == 16 and server.log().count("text 16 of 16") == 1
    with start(novice, *TINY, config={"score_weights": str(path)}) as server:  # one rank, all heads
        assert "learned scores of 16 texts" in server.log()


def test_a_folder_that_cannot_be_written_costs_the_next_start_only(start, novice, tmp_path):
    (tmp_path / "sgl-kvevict").write_text("a file where the cache's folder would be")
    with start(novice, *TINY, config={}, env={"XDG_CACHE_HOME": str(tmp_path)}) as server:
        assert "cannot be written" in server.log() and learned(server)["texts"] == 16


def test_new_weights_keep_the_scores_and_say_so(start, tiny_llama, novice):
    with start(tiny_llama, *TINY, config={}) as server:
        body = json.loads(server.post("/update_weights_from_disk", {"model_path": str(novice)}))
        assert body["success"] and learned(server)["is_stale"]
        assert "scores learned for those stay in use" in server.log()


def test_a_model_without_a_tokenizer_is_refused_by_name(start, novice, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(novice, bare, ignore=shutil.ignore_patterns("tokenizer*", "special_tokens*"))
    with pytest.raises(LaunchError, match="no tokenizer can be loaded from"):
        start(bare, *TINY, config={"score_weights": None})


def test_another_policy_learns_statistics_alone_and_once(start, tmp_path):
    """Rows of few bits need them whatever policy chooses entries; the texts are prefilled, and no pass reads them."""
    model = save_tiny_llama(tmp_path / "model", head_dim=32)  # of 16 dimensions, rows have 16 bits
    path = tmp_path / "learned.safetensors"
    config = {"policy": "snapkv", "score_weights": str(path)}
    with start(model, *TINY, config=config) as server:
        log = server.log()
        assert log.index("learning statistics: text 16 of 16") < log.index("learned statistics") < log.index("Uvicorn")
        assert "learning scores" not in log and "learned_scores" not in plugin_state(server)
        generate(server, random.Random(0).choices(range(3, 500), k=600), 4)
        assert idle_state(server)["span_tokens"] > 500
        assert plugin_state(server)["leaked_slots"] == 0 and server.leak_messages() == []
    with safe_open(path, framework="pt") as file:
        assert "recall" not in file.metadata()
        assert {*file.keys()} == {"rotary", "k_mean", "k_scale", "v_mean", "v_scale"}
    with start(model, *TINY, config=config) as server:
        assert "statistics of keys and values from" in server.log() and "learning" not in server.log()
