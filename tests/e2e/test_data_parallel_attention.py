"""Data-parallel attention on a CPU: each of two ranks has whole requests, and the feed-forward layers are shared."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from helpers.tiny_model import TIE, VOCAB_SIZE, lag, save_tokenizer
from helpers.traffic import generate, states_with_all_slots
from kvevict_tools.launcher import FLOAT32_FLAGS
from sgl_kvevict.client import CacheReport

FLAGS = (
    *("--tp-size", "2", "--attn-dp-size", "2", *FLOAT32_FLAGS, "--skip-tokenizer-init"),
    *("--max-total-tokens", "2000", "--context-length", "1024", "--chunked-prefill-size", "256"),
)
ENV = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}  # one list of cores a rank
CONFIG = {"min_prefix_tokens": 48, "tail_tokens": 16}


@pytest.fixture(scope="module")
def model_folder(tiny_llama, tmp_path_factory):
    """A tiny Qwen3: SGLang's Llama has no data-parallel attention. Its rows can have 4 bits."""
    sizes = LlamaConfig.from_pretrained(tiny_llama).to_dict()
    same = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    same += ("num_key_value_heads", "max_position_embeddings", "initializer_range", "bos_token_id", "eos_token_id")
    torch.manual_seed(0)
    values = {name: sizes[name] for name in same} | {"head_dim": 32}
    config = Qwen3Config(**values, tie_word_embeddings=False, dtype="float32")
    folder = tmp_path_factory.mktemp("tiny-qwen3")
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def prompts(seed: int, count: int) -> list[list[int]]:
    """Of many lengths; each begins with one of two documents."""
    rng = random.Random(seed)
    documents = [[rng.randrange(3, VOCAB_SIZE) for _ in range(300)] for _ in range(2)]
    return [
        rng.choice(documents) + [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(1, 60))]
        for _ in range(count)
    ]


def answer(server, prompt, rank, count=8):
    """Greedy tokens from the scheduler of one rank."""
    return reply(server, prompt, rank, count)["output_ids"]


def reply(server, prompt, rank, count=8, **options):
    """The whole answer of :func:`answer`, to a request with options for the plugin."""
    return generate(server, prompt, count, {"kvevict": options}, routed_dp_rank=rank)


def serve(server, ranks):
    """First one rank alone, then both with as many requests as ``ranks`` names them."""
    asked = prompts(1, len(ranks))
    answers = [answer(server, asked[0], 0)]
    with ThreadPoolExecutor(8) as pool:
        answers += pool.map(answer, [server] * len(asked), asked, ranks)
    return [asked[0], *asked], answers


def test_outputs_are_those_of_the_whole_model_at_budget_one(start, model_folder):
    """Of one process (transformers, float32), with a rank that has none, fewer or as many requests as the other."""
    config = {**CONFIG, "policy": "ada-snapkv", "policy_options": {"window_size": 16}, "budget": 1.0}
    server = start(model_folder, *FLAGS, config=config, env=ENV)
    asked, answers = serve(server, [0, 0, 0, 1, 0, 1, 1, 0, 0, 0, 0, 1])
    states = states_with_all_slots(server)
    server.stop(grace_s=0)
    assert len(states) == 2
    assert all(state["compressions"] >= 1 and state["span_tokens"] >= 284 for state in states)
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    assert max(map(lag, [model] * len(asked), asked, answers)) < TIE


def read(server, prompt, **options):
    """What each rank has read of its compressed prefix for an answer to the same prompt."""
    return [CacheReport.of(reply(server, prompt, rank, 1, **options)["meta_info"]).compressed for rank in (0, 1)]


def test_prefixes_are_compressed_while_the_other_rank_has_no_requests(start, model_folder, tmp_path):
    """Then both serve, from rows of 4 bits.

    Each rank writes its rows with the statistics that it has learned. A tenth of the bytes holds the sinks and a third
    of the other entries; the rest comes back from each rank's own memory of the host.
    """
    policy = {"policy": "snapkv", "policy_options": {"window_size": 16}}
    config = {**CONFIG, **policy, "budget": 0.1, "score_weights": str(tmp_path / "statistics.safetensors")}
    server = start(model_folder, *FLAGS, "--kv-cache-dtype", "bfloat16", config=config, env=ENV)
    for prompt in prompts(1, 6):
        answer(server, prompt, 0)
    idle, busy = sorted(states_with_all_slots(server), key=lambda state: state["span_tokens"])
    assert busy["span_tokens"] >= 284 and busy["span_slots"] < 0.4 * busy["span_tokens"]
    assert idle["span_tokens"] == 0
    asked = prompts(1, 1)[0]
    reports = [CacheReport.of(reply(server, asked, rank)["meta_info"]) for rank in (0, 1)]
    assert reports[0].compressed.num_tokens >= 284 and reports[1].device == 0
    _, answers = serve(server, [0, 1, 1, 0, 1, 0])
    assert [len(tokens) for tokens in answers] == [8] * 7
    assert all(state["span_tokens"] > 0 for state in states_with_all_slots(server))
    answer(server, asked, 1, 1)
    for options, share in (({}, 0.36), ({"complete": True}, 1.0)):
        for report in read(server, asked, **options):
            assert report.num_tokens >= 284 and 4 <= report.bits < 8
            assert report.share == pytest.approx(share, abs=0.02)  # the sum of two rounded numbers
    assert all(state["returned_entries"] > 0 for state in states_with_all_slots(server))
