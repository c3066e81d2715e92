"""Long answers on real servers whose answers are compressed while they are generated."""

from __future__ import annotations

import dataclasses
import math
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from helpers.tiny_model import VOCAB_SIZE
from helpers.traffic import assert_all_slots_are_back, generate, random_jobs, run_jobs

POOL, BLOCK, TAIL = 700, 32, 16
FLAGS = (
    *("--skip-tokenizer-init", "--dtype", "float32", "--max-total-tokens", str(POOL), "--context-length", "2048"),
    *("--enable-mixed-chunk", "--chunked-prefill-size", "64"),
)
CONFIG = {"policy": "h2o", "min_prefix_tokens": 48, "tail_tokens": TAIL, "decode_block": BLOCK}
ENV = {"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "150"}
"""What is reserved for an answer: a quarter of the longest one, a block and the window."""
RANKS = {
    "SGLANG_CPU_OMP_THREADS_BIND": "0|1",  # one list of cores a rank
    "SGLANG_TEST_RETRACT": "1",
    "SGLANG_TEST_RETRACT_INTERVAL": "40",
}
LONG = 400


def prompt_of(seed, length=40):
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]


def slots_held(server):
    """Slots that are neither free nor given up for the asking."""
    state = server.get_json("/server_info")["internal_states"][0]["kvevict"]
    return state["total_slots"] - state["free_slots"]


@pytest.fixture(scope="module")
def server(start, tiny_llama):
    return start(tiny_llama, *FLAGS, config=CONFIG | {"budget": 0.25}, env=ENV)


def test_a_long_answer_holds_its_budget_and_a_block(server):
    looks, prompt = [], prompt_of(1)
    with ThreadPoolExecutor(1) as pool:
        while len(looks) <= 10:  # a busy machine may need more than one answer
            running = pool.submit(generate, server, prompt, LONG)
            while not running.done():
                looks.append(slots_held(server))
            assert len(running.result()["output_ids"]) == LONG
            state = assert_all_slots_are_back(server)
            server.post("/flush_cache?timeout=60")
    # Two steps are under way, and what is due is compressed between them.
    assert max(looks) <= len(prompt) + math.ceil(0.25 * LONG) + BLOCK + TAIL + 2
    assert state["compressions"] >= LONG // BLOCK - 2


def test_answers_that_do_not_fit_the_pool_together_are_generated_together(server):
    """Three of 440 tokens: 1,320 tokens in 700 slots, none taken off to make room for others."""
    server.post("/flush_cache?timeout=60")
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda seed: generate(server, prompt_of(seed), LONG), (2, 3, 4)))
    assert [len(answer["output_ids"]) for answer in answers] == [LONG] * 3
    assert [answer["meta_info"]["num_retractions"] for answer in answers] == [0] * 3
    turn = prompt_of(2) + answers[0]["output_ids"]
    assert generate(server, [*turn, 5, 6, 7], 4)["meta_info"]["cached_tokens"] >= len(turn) - 1
    assert_all_slots_are_back(server)


def long_jobs(count, seed):
    """Prompts that share beginnings, answers of up to 240 tokens, some aborted."""
    jobs = random_jobs(count, seed=seed, vocab_size=VOCAB_SIZE)
    return [dataclasses.replace(job, max_new_tokens=6 * job.max_new_tokens) for job in jobs]


def test_requests_end_and_abort_in_every_phase(server):
    run_jobs(server, long_jobs(24, seed=5), concurrency=16)
    assert_all_slots_are_back(server)
    server.stop(grace_s=0)


def test_answers_equal_stock_at_budget_one(start, tiny_llama):
    stock = start(tiny_llama, *FLAGS)
    prompts = [prompt_of(seed, 120) for seed in (7, 8)]
    with ThreadPoolExecutor(2) as pool:
        expected = [answer["output_ids"] for answer in pool.map(lambda p: generate(stock, p, 120), prompts)]
    stock.stop(grace_s=0)
    server = start(tiny_llama, *FLAGS, config=CONFIG | {"policy": "d2o", "budget": 1.0})
    with ThreadPoolExecutor(2) as pool:
        answers = [answer["output_ids"] for answer in pool.map(lambda p: generate(server, p, 120), prompts)]
    assert answers == expected
    assert assert_all_slots_are_back(server)["compressions"] >= 6
    server.stop(grace_s=0)


def test_ranks_stay_equal_when_requests_are_taken_off(start, tiny_llama):
    flags = (*FLAGS, "--tp-size", "2", "--disable-overlap-schedule")
    server = start(tiny_llama, *flags, config=CONFIG | {"policy": "d2o", "budget": 0.25}, env=ENV | RANKS)
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda seed: generate(server, prompt_of(seed), 120), (9, 10, 9)))
    assert [len(answer["output_ids"]) for answer in answers] == [120] * 3
    run_jobs(server, long_jobs(10, seed=6), concurrency=5)
    assert "#retracted_reqs" in server.log()
    assert assert_all_slots_are_back(server)["compressions"] > 6
