"""Answers that are compressed while they are generated, on real servers with strict checks."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from helpers.draft_models import CHAINS, TREES, save_eagle, save_mimo, save_target
from helpers.event_sockets import wait_until
from helpers.tiny_model import VOCAB_SIZE
from helpers.traffic import Job, assert_all_slots_are_back, generate, idle_state, run_jobs
from kvevict_tools.launcher import FLOAT32_FLAGS
from kvevict_tools.measure import flush, plugin_state

BLOCK, TAIL, LENGTH = 64, 16, 1000
CONFIG = {"min_prefix_tokens": 48, "tail_tokens": TAIL, "answer_block": BLOCK}
FLAGS = (*FLOAT32_FLAGS, "--max-total-tokens", "2500", "--context-length", "2048")

RANKS = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
KINDS = {
    "overlap": ((), {}),
    "ngram": (("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "8"), {}),
    "two ranks, mixed chunks": (("--tp-size", "2", "--enable-mixed-chunk", "--chunked-prefill-size", "100"), RANKS),
    "eagle": (("--speculative-algorithm", "EAGLE", *CHAINS), {}),
    "mtp": (("--speculative-algorithm", "NEXTN", *TREES), {}),
    "standalone": (("--speculative-algorithm", "STANDALONE", *TREES), {}),
}
DRAFTS = {"eagle": save_eagle, "mtp": save_mimo, "standalone": lambda _folder, target: target}
EXACT = {"kvevict": {"exact": True}}


def prompt(num_tokens, seed):
    return random.Random(seed).choices(range(3, VOCAB_SIZE), k=num_tokens)


@pytest.fixture(scope="module", params=KINDS)
def server(start, tiny_llama, request, tmp_path_factory):
    flags, env = KINDS[request.param]
    model = tiny_llama
    if request.param in DRAFTS:
        target = save_target(tmp_path_factory.mktemp("target"))
        draft = DRAFTS[request.param](tmp_path_factory.mktemp("draft"), target)
        model = draft if request.param == "mtp" else target  # MTP layers lie in the model's own files
        flags = (*flags, "--speculative-draft-model-path", str(draft))
    return start(model, *FLAGS, *flags, config=CONFIG, env=env)


def test_a_long_answer_holds_a_part_of_its_slots_and_the_next_turn_finds_all_of_it(server, request):
    flush(server)
    tokens, seen = prompt(300, 1), []

    def is_generating_compressed():
        seen.append(plugin_state(server))
        return seen[-1]["span_tokens"] > 300 + BLOCK

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(generate, server, tokens, LENGTH)
        wait_until(is_generating_compressed)
        assert not running.done() and seen[-1]["protected_slots"] > 0
        answer = running.result()["output_ids"]
    assert len(answer) == LENGTH
    state = assert_all_slots_are_back(server)
    assert state["total_slots"] - state["free_slots"] <= 0.3 * (300 + LENGTH)
    assert state["span_tokens"] > 300 + LENGTH - 48 - TAIL  # fewer than min_prefix_tokens are left
    turn = generate(server, [*tokens, *answer[:-1], *prompt(60, 2)], 8)
    # Drafts that read hidden states have keys of two tokens: the answer's last key has another second one.
    has_pairs = request.node.callspec.params["server"] in ("eagle", "mtp")
    assert turn["meta_info"]["cached_tokens"] == 300 + LENGTH - 1 - has_pairs
    assert_all_slots_are_back(server)


def test_an_exact_answer_is_that_of_the_uncompressed_cache(server):
    """It is the same whatever else was compressed, and what it has generated is not."""
    answers = []
    for _ in range(2):
        flush(server)
        answers.append(generate(server, prompt(100, 3), 300, custom_params=EXACT)["output_ids"])
        assert idle_state(server)["span_tokens"] <= 100
        generate(server, prompt(100, 3), 200)
    assert answers[0] == answers[1]
    assert_all_slots_are_back(server)


def test_requests_that_are_aborted_and_share_answers_leave_nothing(server):
    flush(server)
    jobs = [Job(f"answer-{i}", prompt(60, i % 4), 240, [None, 0.4, 1.5][i % 3]) for i in range(18)]
    run_jobs(server, jobs, concurrency=6)
    state = assert_all_slots_are_back(server)
    assert state["compressions"] > 20


def test_what_a_stop_string_cuts_is_never_found(server):
    tokens = prompt(80, 5)
    flush(server)
    whole = generate(server, tokens, 400)
    text, stop = whole["text"], ""
    for length in range(2, 30):  # its first occurrence is in the middle of a block
        stop = text[len(text) // 2 : len(text) // 2 + length]
        if text.index(stop) > len(text) // 3:
            break
    flush(server)
    sampling = {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True, "stop": [stop]}
    cut = json.loads(server.post("/generate", {"input_ids": tokens, "sampling_params": sampling}))
    assert cut["meta_info"]["finish_reason"]["matched"] == stop and len(cut["output_ids"]) > BLOCK + TAIL
    state = assert_all_slots_are_back(server)
    assert state["full_tokens"] + state["span_tokens"] <= 80 + len(cut["output_ids"])
    again = generate(server, [*tokens, *cut["output_ids"], *whole["output_ids"]], 1)
    assert again["meta_info"]["cached_tokens"] <= 80 + len(cut["output_ids"])


def test_samples_and_grammars(server):
    """``n`` answers grow at the same time; a grammar holds over compressed blocks of its own answer."""
    sampling = {"temperature": 1.0, "max_new_tokens": 200, "n": 3, "ignore_eos": True}
    found = json.loads(server.post("/generate", {"input_ids": prompt(90, 7), "sampling_params": sampling}))
    assert [len(one["output_ids"]) for one in found] == [200] * 3
    sampling = {"temperature": 0, "max_new_tokens": 300, "regex": "(ab|ba){100,110}"}
    text = json.loads(server.post("/generate", {"input_ids": prompt(90, 8), "sampling_params": sampling}))["text"]
    assert 200 <= len(text) <= 220 and set(zip(text[::2], text[1::2], strict=True)) <= {("a", "b"), ("b", "a")}
    answer = generate(server, prompt(90, 9), 200, return_logprob=True)
    assert len(answer["meta_info"]["output_token_logprobs"]) == 200
    assert_all_slots_are_back(server)


def test_room_that_compression_makes_is_used_before_a_request_ends(server):
    """Each request fits as soon as the prompts before it are compressed: answers count with what they will hold."""
    flush(server)
    before = len(server.log())
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda seed: generate(server, prompt(700, 30 + seed), 700), range(4)))
    assert "#running-req: 4" in server.log()[before:]
    assert_all_slots_are_back(server)


def test_more_answers_than_fit_are_retracted_and_go_on(server):
    """Eight answers of 500 tokens in a pool of 2,500 slots; none fails, each finds its own blocks again."""
    flush(server)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda seed: generate(server, prompt(100, 20 + seed), 500), range(8)))
    assert [len(one["output_ids"]) for one in found] == [500] * 8
    assert_all_slots_are_back(server)
