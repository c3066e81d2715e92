"""Speculative decoding over compressed prefixes: the same answers as without, and every slot comes back."""

from __future__ import annotations

import json

import pytest

from helpers import overlapped_drafts, traffic
from helpers.tiny_model import VOCAB_SIZE, save_tokenizer
from helpers.traffic import RETRACTIONS, assert_all_slots_are_back, generate, idle_state, numbers, random_jobs, run_jobs
from kvevict_tools.launcher import FLOAT32_FLAGS

CONFIG = {"policy": "ada-snapkv", "min_prefix_tokens": 48, "tail_tokens": 16, "policy_options": {"window_size": 16}}
FLAGS = (*FLOAT32_FLAGS, "--max-total-tokens", "2000", "--context-length", "1024")
NGRAM = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "8")
CHAINS = ("--speculative-algorithm", "STANDALONE", "--speculative-num-steps", "3", "--speculative-eagle-topk", "1")
TREES = ("--speculative-algorithm", "STANDALONE", "--speculative-num-steps", "3", "--speculative-eagle-topk", "2")
SIZES = {CHAINS: "4", TREES: "6"}
NEW_TOKENS = 40


DOCUMENT = numbers(0, 400)
PROMPTS = [DOCUMENT + numbers(seed, 7) for seed in range(1, 6)] + [numbers(6, 30)]
"""Five requests that read one compressed document, and one that reads nothing."""


def answers(server, **options):
    """All at once, on a document that was compressed before; with what SGLang says of each request."""
    generate(server, DOCUMENT, 0)
    return traffic.answers(server, PROMPTS, NEW_TOKENS, **options)


def comes_back(server, num_others=14):
    """What is generated over the document before others took its place, and after it came back from the host."""
    server.post("/flush_cache?timeout=60")
    generate(server, DOCUMENT, 0)
    before = generate(server, PROMPTS[0], NEW_TOKENS)
    for seed in range(20, 20 + num_others):
        # Their answers stay uncompressed, as the document's: else they would go first, because they would come back.
        generate(server, numbers(seed, 900), 20)
    moved = idle_state(server)["moved_in_tokens"]
    after = generate(server, PROMPTS[0], NEW_TOKENS)
    assert idle_state(server)["moved_in_tokens"] >= moved + 384
    return before, after


@pytest.fixture(scope="module")
def model(tiny_llama):
    save_tokenizer(tiny_llama)
    return tiny_llama


@pytest.fixture(scope="module")
def plain(start, model):
    """Answers without speculation: over the compressed document, exact ones, and one with log-probabilities."""
    server = start(model, *FLAGS, config=CONFIG | {"budget": 0.2})
    compressed, _ = answers(server)
    info = logprobs(server)
    exact, _ = answers(server, custom_params={"kvevict": {"exact": True}})
    _, back = comes_back(server)
    server.stop(grace_s=0)
    return {"compressed": compressed, "exact": exact, "logprobs": info, "back": back["output_ids"]}


def flags_of(speculation, model):
    """Of a server; a model is its own draft model."""
    if speculation is NGRAM:
        return (*FLAGS, *NGRAM)
    draft = ("--speculative-draft-model-path", str(model), "--speculative-num-draft-tokens", SIZES[speculation])
    return (*FLAGS, *speculation, *draft)


@pytest.fixture(scope="module", params=[NGRAM, TREES], ids=["ngram", "standalone-trees"])
def speculation(request):
    return request.param


@pytest.fixture(scope="module")
def server(start, model, plain, speculation):
    """Overlap schedule off, and with trees of a draft model on."""
    patch = overlapped_drafts.__name__ if speculation is TREES else None
    server = start(model, *flags_of(speculation, model), config=CONFIG | {"budget": 0.2}, patch=patch)
    assert server.get_json("/server_info")["disable_overlap_schedule"] == (patch is None)
    return server


def logprobs(server):
    """Log-probabilities of an answer over the compressed document."""
    info = generate(server, PROMPTS[0], 20, return_logprob=True)["meta_info"]
    return [entry[:2] for entry in info["output_token_logprobs"]]


def test_answers_over_a_compressed_document_are_the_same(server, plain, speculation):
    """The second time NGRAM's drafts are right, as its corpus has the first answers: whole branches are accepted."""
    for least_accepted in (0, 3.0 if speculation is NGRAM else 0):
        found, infos = answers(server)
        assert found == plain["compressed"]
        state = assert_all_slots_are_back(server)
        assert state["span_slots"] == 80 and state["max_sharers"] >= 2  # 0.2 * 400
        assert all(info["spec_accept_length"] >= least_accepted for info in infos)
        assert [info["cached_tokens"] for info in infos][: len(PROMPTS) - 1] >= [400] * (len(PROMPTS) - 1)


def test_log_probabilities_are_the_same(server, plain):
    found = logprobs(server)
    assert [token for _, token in found] == [token for _, token in plain["logprobs"]]
    assert [value for value, _ in found] == pytest.approx([value for value, _ in plain["logprobs"]], abs=2e-3)


def test_exact_requests_read_no_span(server, plain):
    found, _ = answers(server, custom_params={"kvevict": {"exact": True}})
    assert found == plain["exact"]
    assert_all_slots_are_back(server)


def test_several_answers_and_grammars(server):
    """``n`` samples share the document; a grammar holds although drafts break it."""
    sampling = {"temperature": 1.0, "max_new_tokens": 16, "n": 3, "ignore_eos": True}
    found = json.loads(server.post("/generate", {"input_ids": PROMPTS[0], "sampling_params": sampling}))
    assert [len(one["output_ids"]) for one in found] == [16] * 3
    sampling = {"temperature": 0, "max_new_tokens": 30, "regex": "(ab|ba){4,6}"}
    text = json.loads(server.post("/generate", {"input_ids": PROMPTS[1], "sampling_params": sampling}))["text"]
    assert 8 <= len(text) <= 12 and set(zip(text[::2], text[1::2], strict=True)) <= {("a", "b"), ("b", "a")}
    assert_all_slots_are_back(server)


def test_sampled_and_greedy_requests_of_one_batch(server, plain):
    """Limits on the sampled tokens; ``top_k`` 1 is greedy, although the batch is sampled."""
    # After exact requests the document may be gone, and the prompt compressed as a whole: 407 tokens instead of 400.
    server.post("/flush_cache?timeout=60")
    answers(server)  # the document again, and drafts that are right
    samplings = [{"top_k": 1}, {"top_p": 1e-6}, {"top_k": 5, "top_p": 0.8}, {"temperature": 0}]
    options = [{"temperature": 1.0, "max_new_tokens": 16, "ignore_eos": True} | one for one in samplings]
    body = {"input_ids": [PROMPTS[0]] * len(options), "sampling_params": options}
    found = [one["output_ids"] for one in json.loads(server.post("/generate", body))]
    assert found[0] == found[1] == found[3] == plain["compressed"][0][:16] and len(found[2]) == 16
    assert_all_slots_are_back(server)


def test_answers_over_a_prefix_that_comes_back_from_the_host_are_the_same(server, plain):
    _, after = comes_back(server)
    assert after["output_ids"] == plain["back"]
    assert_all_slots_are_back(server)


def test_random_requests_on_a_pool_that_is_too_small(server):
    """Aborts, drafts of all lengths, pressure while drafts are held beyond what is accepted."""
    run_jobs(server, random_jobs(120, seed=1, vocab_size=VOCAB_SIZE), concurrency=24)
    state = assert_all_slots_are_back(server)
    assert state["compressions"] > 5
    server.post("/flush_cache?timeout=60")
    state = assert_all_slots_are_back(server)
    assert state["free_slots"] == state["total_slots"] and state["spans"] == 0
    server.stop(grace_s=0)


@pytest.mark.parametrize("speculation", [NGRAM, CHAINS], ids=["ngram", "standalone-chains"])
def test_two_ranks_at_budget_one_under_retractions(start, model, plain, speculation):
    """Everything kept: the answers of exact requests, also when requests are taken off and come back.

    A draft model that equals the target's drafts right as long as it has its rows of the document, also when that comes
    back from the host's memory.
    """
    flags = flags_of(speculation, model)
    patch = overlapped_drafts.__name__ if speculation is NGRAM else None
    server = start(model, *flags, "--tp-size", "2", config=CONFIG | {"budget": 1.0}, env=RETRACTIONS, patch=patch)
    for _ in range(2):
        assert answers(server)[0] == plain["exact"]
    before, after = comes_back(server, num_others=3)
    assert after["output_ids"] == before["output_ids"] == plain["exact"][0]
    if speculation is CHAINS:
        lengths = [result["meta_info"]["spec_accept_length"] for result in (before, after)]
        assert lengths[1] == lengths[0] > 2
    run_jobs(server, random_jobs(30, seed=2, vocab_size=VOCAB_SIZE), concurrency=12)
    assert "#retracted_reqs" in server.log()
    assert assert_all_slots_are_back(server)["compressions"] > 1
    server.stop(grace_s=0)
