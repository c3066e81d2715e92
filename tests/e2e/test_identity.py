"""Stock SGLang and ours at budget 1.0, the same real model, the same prompts: the same greedy answers.

In float32, where the two attention implementations differ by less than any margin between two tokens that matters;
in bfloat16 either implementation rounds differently from run to run of a different batch, stock's own included.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from helpers.traffic import generate, idle_state
from kvevict_tools.launcher import FLOAT32_FLAGS

HANDBOOK = Path(__file__).parents[2] / "examples" / "data" / "station_handbook.txt"
FLAGS = (*FLOAT32_FLAGS, "--max-total-tokens", "2400", "--chunked-prefill-size", "125")
CONFIG = {"policy": "ada-snapkv", "budget": 1.0, "min_prefix_tokens": 48}
FEW = slice(3, 14)
"""Prompts of up to 170 tokens, some of which share a beginning."""
QUESTIONS = ("How far away is the nearest town?", "Where does the boat land?", "What grows on the island?")


@pytest.fixture(scope="module")
def prompts(demo_model):
    """20 prompts of 8 to 550 tokens, up to five chunks; many share a prefix, some only the first tokens."""
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    text = HANDBOOK.read_text(encoding="utf-8")
    words = text.split()

    def chat(content):
        turns = [{"role": "user", "content": content}]
        return list(tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False))

    def plain(content, limit):
        return list(tokenizer(content).input_ids[:limit])

    chats = [chat(" ".join(words[:200]) + "\n\n" + question) for question in QUESTIONS]  # about 250 shared tokens
    chats += [chat(" ".join(words[:75]) + "\n\n" + question) for question in QUESTIONS]
    chats += [chat(question) for question in QUESTIONS]
    texts = [plain(text, limit) for limit in (8, 25, 83, 84, 150, 225)]
    texts += [plain(" ".join(words[start:]) + text, limit) for start, limit in ((200, 125), (500, 175), (900, 550))]
    texts += [[*texts[3], *plain(question, 12)] for question in QUESTIONS[:2]]
    assert len(chats + texts) == 20 and max(map(len, texts)) == 550
    return chats + texts


def answers(server, prompts, concurrency):
    with ThreadPoolExecutor(concurrency) as pool:
        results = list(pool.map(lambda prompt: generate(server, prompt, 8), prompts))
    return [result["output_ids"] for result in results]


def logprobs(server, prompt):
    """Of the last tokens of a prompt whose others are cached, and of the answer's."""
    server.post("/flush_cache")
    generate(server, prompt[:-8], 0)
    body = {"sampling_params": {"temperature": 0, "max_new_tokens": 4}, "return_logprob": True}
    body |= {"input_ids": prompt, "logprob_start_len": len(prompt) - 8}
    info = json.loads(server.post("/generate", body))["meta_info"]
    assert info["cached_tokens"] == len(prompt) - 8
    return [entry[0] for entry in info["input_token_logprobs"][1:] + info["output_token_logprobs"]]


@pytest.fixture(scope="module")
def stock_results(start, demo_model, prompts):
    """Answers and log-probabilities of stock SGLang, which is gone when ours starts."""
    stock = start(demo_model, *FLAGS)
    results = answers(stock, prompts, 1), logprobs(stock, prompts[0])
    stock.stop(grace_s=0)
    return results


@pytest.fixture(scope="module")
def full_budget(start, demo_model, stock_results):
    return start(demo_model, *FLAGS, config=CONFIG)


def test_greedy_outputs_equal_stock_single_and_concurrent(full_budget, prompts, stock_results):
    expected, _ = stock_results
    assert answers(full_budget, prompts, 1) == expected
    state = idle_state(full_budget)
    assert state["compressions"] >= 7 and state["spans"] > state["segments"]  # some were split by later prompts
    assert answers(full_budget, prompts, 4) == expected  # now from the compressed tree
    full_budget.post("/flush_cache")
    assert answers(full_budget, prompts, 4) == expected  # all at once on an empty tree
    state = idle_state(full_budget)
    assert state["leaked_slots"] == 0 and full_budget.leak_messages() == []


def test_policy_none_compresses_nothing_and_answers_as_stock(start, demo_model, prompts, stock_results):
    server = start(demo_model, *FLAGS, config={"policy": "none"})
    assert answers(server, prompts, 4) == stock_results[0] == answers(server, prompts, 4)
    state = idle_state(server)
    assert (state["policy"], state["compressions"], state["host_bytes"]) == ("none", 0, 0)
    assert state["leaked_slots"] == 0 and server.leak_messages() == []
    server.stop()


def test_max_new_tokens_zero_prompt_logprobs_see_full_positions(full_budget, prompts, stock_results):
    """The first token after a compressed prefix has its logical position: log-probabilities at budget 1.0 agree."""
    _, expected = stock_results
    assert logprobs(full_budget, prompts[0]) == pytest.approx(expected, abs=2e-3)


@pytest.fixture(scope="module")
def compressing(start, demo_model):
    return start(demo_model, *FLAGS, config=CONFIG | {"budget": 0.1})


def test_one_compressed_copy_serves_eight_requests(compressing, prompts):
    """At budget 0.1: the slots of a prefix are exactly ceil(0.1 * range), however many requests read it.

    In a pool of float32, an eighth of the bytes holds every entry in 4 bits.
    """
    server = compressing
    document = prompts[0][:225]
    generate(server, document, 0)  # how the frontend language caches a shared prefix
    state = idle_state(server)
    assert (state["span_tokens"], state["span_slots"]) == (225, 23)  # ceil(0.1 * 225)
    suffixes = [prompts[6][-20 - i :] for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda suffix: generate(server, document + suffix, 24), suffixes))
    assert [result["meta_info"]["cached_tokens"] for result in results] == [225] * 8
    state = idle_state(server)
    assert state["max_sharers"] == 8
    assert (state["span_slots"], state["segments"]) == (23, 1)
    assert state["leaked_slots"] == 0 and server.leak_messages() == []
    server.post("/flush_cache?timeout=60")


def test_exact_requests_equal_stock_on_a_server_that_compresses(compressing, prompts, stock_results):
    """At budget 0.1: while others read and shrink the same prefixes."""
    expected, _ = stock_results
    server = compressing
    answers(server, prompts[FEW], 4)
    state = idle_state(server)
    assert state["compressions"] >= 2
    exact = {"kvevict": {"exact": True}}
    with ThreadPoolExecutor(6) as pool:
        others = [pool.submit(generate, server, prompt, 8) for prompt in prompts[FEW]]
        results = list(pool.map(lambda prompt: generate(server, prompt, 8, custom_params=exact), prompts[FEW]))
        assert all(len(other.result()["output_ids"]) == 8 for other in others)
    assert [result["output_ids"] for result in results] == expected[FEW]
    state = idle_state(server)
    assert state["leaked_slots"] == 0 and server.leak_messages() == []
