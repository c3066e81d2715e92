"""Every family of ``docs/models.md`` in real servers: ``make test-models``."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from models.families import FAMILIES, Family, config_of
from models.images import SIGHTS, picture, tokenizer
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from helpers.e2e_env import ENV
from helpers.tiny_model import save_tokenizer
from helpers.traffic import generate, idle_state, idle_states, random_jobs, run_jobs
from kvevict_kernels.rotary import Rotary
from kvevict_tools.launcher import KVEVICT_CPU_FLAGS, STOCK_CPU_FLAGS, RunningServer, config_env, launch
from sgl_kvevict.distill.features import NUM_WINDOW
from sgl_kvevict.distill.files import Learned, ModelIdentity, save_learned
from sgl_kvevict.distill.fingerprint import fingerprint_of
from sgl_kvevict.distill.weights import ScoreWeights

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

FLAGS = ("--skip-server-warmup", "--max-total-tokens", "3000", "--context-length", "1024")
COMMON = {"min_prefix_tokens": 64, "tail_tokens": 16}
EVERYTHING = COMMON | {"policy": "ada-snapkv", "budget": 1.0}
"""Everything is kept, in spans."""
DEFAULT = COMMON
"""The default policy and budget, for a small prefix."""


def save(family: Family, folder: Path) -> Path:
    torch.manual_seed(0)
    sight = SIGHTS.get(family.model_type)
    kind = AutoModelForCausalLM if sight is None else AutoModelForImageTextToText
    model = kind.from_config(config_of(family))
    for name, weights in model.named_parameters():
        if name.endswith("A_log"):
            weights.data.fill_(-4.0)  # a recurrent state remembers some 40 tokens, so that a wrong one shows
    model.to(getattr(torch, family.dtype)).save_pretrained(folder)
    if sight is None:
        save_tokenizer(folder)  # scores are learned from texts
    else:
        sight.processor(tokenizer()).save_pretrained(folder)
    return folder


def serve(
    family: Family, model: Path, log: Path, config: dict[str, Any] | None, env: Mapping[str, str] = ENV
) -> RunningServer:
    base = STOCK_CPU_FLAGS if config is None else KVEVICT_CPU_FLAGS
    env = {**env, **({} if config is None else config_env(config))}
    flags = [*base, *FLAGS, *family.flags, "--dtype", family.dtype]
    flags += [] if family.sees else ["--skip-tokenizer-init"]
    return launch(str(model), flags=flags, env=env, log_path=log)


def prompts() -> list[list[int]]:
    """Four that share 300 tokens, or 150 of them, and one of its own."""
    rng = random.Random(0)
    document, other = ([rng.randrange(3, 500) for _ in range(count)] for count in (300, 40))
    return [document, [*document, 7, 8, 9], [*document, *other], [*document[:150], *other], other]


def answers(server: RunningServer) -> list[list[int]]:
    return [generate(server, prompt, 6)["output_ids"] for prompt in prompts()]


def logprobs(server: RunningServer) -> list[float]:
    """Of the last tokens of a prompt whose others are cached, and of the answer's."""
    prompt = prompts()[0]
    body = {"sampling_params": {"temperature": 0, "max_new_tokens": 4}, "return_logprob": True}
    body |= {"input_ids": prompt, "logprob_start_len": len(prompt) - 8}
    info = json.loads(server.post("/generate", body))["meta_info"]
    return [entry[0] for entry in info["input_token_logprobs"][1:] + info["output_token_logprobs"]]


def prompt_logprobs(server: RunningServer, count: int) -> torch.Tensor:
    """[count], float32, of the first prompt's last tokens; those before are read from the cache."""
    prompt = prompts()[0]
    body = {"sampling_params": {"temperature": 0, "max_new_tokens": 1}, "return_logprob": True}
    body |= {"input_ids": prompt, "logprob_start_len": len(prompt) - count - 1}
    info = json.loads(server.post("/generate", body))["meta_info"]
    return torch.tensor([entry[0] for entry in info["input_token_logprobs"][1:]])


def of_transformers(model: Path) -> tuple[list[list[int]], list[float]]:
    """The same answers and log-probabilities by the model's definition in transformers."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    answers = []
    with torch.inference_mode():
        for prompt in prompts():
            ids = torch.tensor([prompt])
            for _ in range(6):
                ids = torch.cat([ids, loaded(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
            answers.append(ids[0, len(prompt) :].tolist())
    return answers, last_logprobs(model, torch.float32, prompts()[0] + answers[0][:4], 11).tolist()


def last_logprobs(model: Path, dtype: torch.dtype, tokens: list[int], count: int) -> torch.Tensor:
    """[count], float32, of the last tokens, by transformers."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
    ids = torch.tensor(tokens)
    with torch.inference_mode():
        scores = loaded(ids[None]).logits[0, :-1].float().log_softmax(-1)
    return scores.gather(1, ids[1:, None]).squeeze(1)[-count:]


LATENTS = "DeepSeek V2"
RECURRENT = [family for family in FAMILIES if family.recurrent and not family.sees]
SERVED = [family for family in FAMILIES if family.reason is None and not family.recurrent]


def words(seed: int, count: int) -> str:
    rng = random.Random(seed)
    return " ".join(f"w{rng.randrange(40, 500)}" for _ in range(count))


def seen(server: RunningServer, placeholder: str) -> list[dict[str, Any]]:
    """Text alone, an image in a prefix that is found three times, another in its place, and both."""
    first, other = picture(1), picture(2)
    document = f"{words(1, 120)} {placeholder} {words(2, 120)}"
    asked = [
        (words(3, 150), []),
        (document, [first]),
        *((f"{document} {words(10 + i, 20)}", [first]) for i in range(3)),
    ]
    asked += [(f"{document} {words(10 + i, 20)}", [other]) for i in range(2)]
    asked += [(f"{document} {words(12, 20)} {placeholder} {words(4, 5)}", [first, other])]
    sampling = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
    return [
        json.loads(
            server.post(
                "/generate",
                {"text": text, "image_data": images or None, "sampling_params": sampling, "return_logprob": True},
            )
        )
        for text, images in asked
    ]


def save_weights_of(family: Family, model: Path, path: Path) -> None:
    """Learned scores of random weights, so that prefixes with images can be scored."""
    config = config_of(family).text_config
    width, is_neox = SIGHTS[family.model_type].rotary
    angles = torch.arange(2.0)[:, None] * config.rope_parameters["rope_theta"] ** -(torch.arange(0, width, 2) / width)
    rotary = Rotary(torch.cat([angles.cos(), angles.sin()], dim=1), is_neox)
    num_layers = getattr(config, "layer_types", ["full_attention"] * 3).count("full_attention")
    identity = ModelIdentity(model.name, fingerprint_of(model), num_layers, 4, 16, rotary)
    shapes = (identity.shape, (*identity.shape[:2], identity.shape[2] + NUM_WINDOW))
    scores = ScoreWeights(*(torch.randn(shape) for shape in shapes), num_prefixes=1)
    save_learned(path, Learned(scores), identity)


STRATEGIES = {
    "no_buffer": ("--disable-overlap-schedule",),
    "extra_buffer": ("--mamba-track-interval", "64"),
}
"""How SGLang keeps states: copied at the end of what a request computed, or as snapshots on a grid."""
STATES_FOUND = {"no_buffer": [0, 329, 329, 0, 0], "extra_buffer": [0, 320, 320, 0, 192]}
"""Tokens that each request of :func:`chats` finds; the grid is one of 64 tokens."""


def recurrent_env(folder: Path) -> dict[str, str]:
    """Servers with this environment take the tests' definitions of SGLang's kernels of recurrent layers."""
    package = folder / "recurrent-0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: recurrent\nVersion: 0\n")
    (package / "entry_points.txt").write_text("[sglang.srt.plugins]\nrecurrent = models.recurrent.plugin:register\n")
    path = [str(folder), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return ENV | {"PYTHONPATH": os.pathsep.join(path), "SGLANG_MAMBA_CONV_DTYPE": "float32"}


def with_states(family: Family, strategy: str) -> Family:
    """A family with recurrent layers, and the flags of a server that keeps states so."""
    flags = ("--mamba-radix-cache-strategy", strategy, *STRATEGIES[strategy], "--max-mamba-cache-size", "24")
    return replace(family, flags=(*family.flags, *flags))


@pytest.mark.parametrize("family", [family for family in FAMILIES if family.sees], ids=lambda family: family.name)
def test_images_are_served(family, tmp_path):
    """As stock without compression; then compressed by learned scores, without a pass."""
    placeholder, model = SIGHTS[family.model_type].placeholder, save(family, tmp_path / "model")
    env, least = ENV, 400
    if family.recurrent:
        family, env, least = with_states(family, "extra_buffer"), recurrent_env(tmp_path), 300
    with serve(family, model, tmp_path / "stock.log", None, env) as stock:
        expected = seen(stock, placeholder)
    with serve(family, model, tmp_path / "whole.log", EVERYTHING, env) as ours:
        got = seen(ours, placeholder)
        state = idle_state(ours)
        assert state["span_tokens"] >= least and state["leaked_slots"] == 0
    assert [answer["output_ids"] for answer in got] == [answer["output_ids"] for answer in expected]
    found, wanted = ([a["meta_info"]["cached_tokens"] for a in answers] for answers in (got, expected))
    assert found == wanted and max(found[5:6]) <= 122 < min(found[2:5])  # the other image finds the text before it
    for ours_info, info in ((a["meta_info"], b["meta_info"]) for a, b in zip(got, expected, strict=True)):
        mine, stocks = ([entry[0] for entry in i["output_token_logprobs"]] for i in (ours_info, info))
        assert mine == pytest.approx(stocks, abs=2e-3)
    save_weights_of(family, model, tmp_path / "weights.safetensors")
    config = DEFAULT | {"score_weights": str(tmp_path / "weights.safetensors")}
    with serve(family, model, tmp_path / "default.log", config, env) as ours:
        for _ in range(2):
            assert [len(answer["output_ids"]) for answer in seen(ours, placeholder)] == [6] * 8
        state = idle_state(ours)
        assert state["span_tokens"] >= least and state["span_slots"] < 0.3 * state["span_tokens"]
        assert state["leaked_slots"] == 0 and ours.leak_messages() == [] and state["errors"] == {}


IN_BFLOAT16 = ("Llama 2, 3; SmolLM2", "Mistral, Ministral", "Gemma 3", "gpt-oss")


@pytest.mark.parametrize("family", [f for f in SERVED if not f.sees], ids=lambda family: family.name)
def test_served(family, tmp_path):
    model = save(family, tmp_path / "model")
    if family.in_stock:
        with serve(family, model, tmp_path / "stock.log", None) as stock:
            expected, wanted = answers(stock), logprobs(stock)
    else:
        expected, wanted = of_transformers(model)
    with serve(family, model, tmp_path / "whole.log", EVERYTHING) as ours:
        assert answers(ours) == expected
        assert logprobs(ours) == pytest.approx(wanted, abs=2e-3)
        state = idle_state(ours)
        assert state["span_tokens"] >= 284 and state["leaked_slots"] == 0
    with serve(family, model, tmp_path / "default.log", DEFAULT) as ours:
        for _ in range(2):
            assert [len(tokens) for tokens in answers(ours)] == [6] * 5
        state = idle_state(ours)
        assert state["span_tokens"] >= 284 and state["span_slots"] < 0.3 * state["span_tokens"]
        assert state["leaked_slots"] == 0 and ours.leak_messages() == []


@pytest.mark.parametrize("name", IN_BFLOAT16)
def test_bfloat16_is_as_near_to_float32_as_without_spans(name, tmp_path):
    """With everything kept: at most twice the error of stock SGLang, where it runs, or of the policy ``none``."""
    family = next(replace(family, dtype="bfloat16") for family in FAMILIES if family.name == name)
    model, count = save(family, tmp_path / "model"), 31
    with serve(family, model, tmp_path / "whole.log", EVERYTHING) as ours:
        answers(ours)
        got = prompt_logprobs(ours, count)
        assert idle_state(ours)["span_tokens"] >= 284
    if family.in_stock:
        references = []
        for dtype in ("float32", "bfloat16"):
            with serve(replace(family, dtype=dtype), model, tmp_path / f"{dtype}.log", None) as stock:
                references.append(prompt_logprobs(stock, count))
        exact, baseline = references
    else:
        exact = last_logprobs(model, torch.float32, prompts()[0], count)
        with serve(family, model, tmp_path / "none.log", {"policy": "none"}) as uncompressed:
            answers(uncompressed)
            baseline = prompt_logprobs(uncompressed, count)
    error, allowed = (got - exact).abs().max(), 2 * (baseline - exact).abs().max()
    print(f"{name}: largest error {error:.4f}, without spans {allowed / 2:.4f}")
    assert error <= allowed


@pytest.mark.parametrize("policy", ["d2o", "k-vec"])
def test_other_policies_with_latents(policy, tmp_path):
    """A merged row is a value, too."""
    family = next(family for family in FAMILIES if family.name == LATENTS)
    model = save(family, tmp_path / "model")
    with serve(family, model, tmp_path / "server.log", COMMON | {"policy": policy, "budget": 0.3}, ENV) as ours:
        assert [len(tokens) for tokens in answers(ours)] == [6] * 5
        state = idle_state(ours)
        assert state["span_tokens"] > 0 and state["span_slots"] < 0.4 * state["span_tokens"]
        assert state["leaked_slots"] == 0 and not any(state["errors"].values())


TWO_RANKS = ENV | {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
"""One list of cores a rank."""


@pytest.mark.parametrize("config", [EVERYTHING, DEFAULT], ids=["everything", "default"])
@pytest.mark.parametrize("name", ["gpt-oss", "gpt-oss, on one pool", LATENTS])
def test_two_ranks(name, config, tmp_path):
    """Windows on a pool of their own and on one pool: each rank has half of the heads and decides as the other.

    Of latents each rank has a copy, and keeps those that its own query heads read: as many as the other. Not Gemma 3
    and Olmo 3: see the next test.
    """
    family = next(family for family in FAMILIES if family.name == name)
    family = replace(family, flags=(*family.flags, "--tp-size", "2"))
    model = save(family, tmp_path / "model")
    with serve(family, model, tmp_path / "server.log", config, TWO_RANKS) as ours:
        got = [answers(ours) for _ in range(2)]
        if config is EVERYTHING:
            expected, wanted = of_transformers(model)
            assert got == [expected] * 2
            assert logprobs(ours) == pytest.approx(wanted, abs=2e-3)
        else:
            state = idle_state(ours)
        assert state["ranks"][0] == state["ranks"][1]
        assert state["span_tokens"] >= 284 and state["leaked_slots"] == 0 and ours.leak_messages() == []
        assert config is EVERYTHING or state["span_slots"] < 0.3 * state["span_tokens"]


def test_latents_with_data_parallel_attention(tmp_path):
    """Each rank has requests, latents and a tree of its own."""
    family = next(family for family in FAMILIES if family.name == LATENTS)
    family = replace(family, flags=(*family.flags, "--tp-size", "2", "--attn-dp-size", "2"))
    model = save(family, tmp_path / "model")
    expected, _ = of_transformers(model)
    with serve(family, model, tmp_path / "server.log", EVERYTHING, TWO_RANKS) as ours:
        got = [answers(ours) for _ in range(2)]
        states = idle_states(ours)
        assert len(states) == 2 and all(state["leaked_slots"] == 0 for state in states)
        assert sum(state["span_tokens"] for state in states) >= 284 and ours.leak_messages() == []
    assert got == [expected] * 2


@pytest.mark.parametrize("name", ["Gemma 3", "Olmo 3"])
def test_stock_is_wrong_with_two_ranks(name, tmp_path):
    """Why these are not compared with two ranks: stock's own answers are not those of the model's definition."""
    family = next(family for family in FAMILIES if family.name == name)
    family = replace(family, flags=(*family.flags, "--tp-size", "2"))
    model = save(family, tmp_path / "model")
    with serve(family, model, tmp_path / "stock.log", None, TWO_RANKS) as stock:
        assert answers(stock) != of_transformers(model)[0]


def chats(server: RunningServer) -> list[tuple[list[int], dict[str, Any]]]:
    """Prompts and answers: a first turn, two second turns after it, and two prompts that leave its middle."""
    first, *others = prompts()

    def ask(prompt: list[int], count: int = 6) -> tuple[list[int], dict[str, Any]]:
        sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
        return prompt, json.loads(server.post("/generate", body))

    asked = [ask(first, 30)]
    turn = [*first, *asked[0][1]["output_ids"][:-1]]
    ask([*turn, 9], 1)
    asked += [ask([*turn, *others[i][-20:]]) for i in (1, 0)]
    asked += [ask([*first[:200], *others[i][-20:]]) for i in (1, 0)]
    return asked


@pytest.mark.parametrize("config", [EVERYTHING, DEFAULT], ids=["everything", "default"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("family", RECURRENT, ids=lambda family: family.name)
def test_recurrent_layers_go_on_where_a_state_is(family, strategy, config, tmp_path):
    """Later prompts begin with a state, and read the KV before it from spans; then requests are many, states few."""
    model = save(family, tmp_path / "model")
    family, env = with_states(family, strategy), recurrent_env(tmp_path)
    with serve(family, model, tmp_path / "server.log", config, env) as ours:
        asked = chats(ours)
        state = idle_state(ours)
        assert state["span_tokens"] >= 284
        run_jobs(ours, random_jobs(24, seed=0, vocab_size=500, longest=300), concurrency=4)
        assert idle_state(ours)["leaked_slots"] == 0 and ours.leak_messages() == []
    assert [answer["meta_info"]["cached_tokens"] for _, answer in asked] == STATES_FOUND[strategy]
    if config is DEFAULT:
        assert state["span_slots"] < 0.3 * state["span_tokens"]
        return
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for prompt, answer in asked:
        tokens = answer["output_ids"]
        with torch.inference_mode():
            scores = loaded(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        assert tokens == scores.argmax(-1).tolist()
        got = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
        assert got == pytest.approx(scores.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist(), abs=2e-3)
