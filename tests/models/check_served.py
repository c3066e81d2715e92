"""Every family of ``docs/models.md`` in real servers: ``make test-models``."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from models.families import FAMILIES, Family, config_of
from transformers import AutoModelForCausalLM

from helpers.e2e_env import ENV
from helpers.traffic import generate, idle_state
from sgl_kvevict.launcher import (
    KVEVICT_CPU_FLAGS,
    STOCK_CPU_FLAGS,
    RunningServer,
    config_env,
    launch,
)
from sgl_kvevict.measure import wait_until_scored

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

FLAGS = ("--skip-tokenizer-init", "--max-total-tokens", "3000", "--context-length", "1024")
COMMON = {"min_prefix_tokens": 64, "tail_tokens": 16}
EVERYTHING = COMMON | {"policy": "ada-snapkv", "budget": 1.0}
"""Everything is kept, in spans."""
DEFAULT = COMMON | {"pass_share": 1.0, "scoring_pass_tokens": 128}
"""The default policy and budget, for a small prefix."""


def save(family: Family, folder: Path) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(family))
    model.to(getattr(torch, family.dtype)).save_pretrained(folder)
    return folder


def serve(family: Family, model: Path, log: Path, config: dict[str, Any] | None) -> RunningServer:
    base = STOCK_CPU_FLAGS if config is None else KVEVICT_CPU_FLAGS
    env = ENV | ({} if config is None else config_env(config))
    flags = [*base, *FLAGS, *family.flags, "--dtype", family.dtype]
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


def of_transformers(model: Path) -> tuple[list[list[int]], list[float]]:
    """The same answers and log-probabilities by the model's definition in transformers."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    texts = []
    with torch.inference_mode():
        for prompt in prompts():
            ids = torch.tensor([prompt])
            for _ in range(6):
                ids = torch.cat([ids, loaded(ids).logits[:, -1:].argmax(-1)], dim=1)
            texts.append(ids[0].tolist())
        whole = torch.tensor([texts[0][: len(prompts()[0]) + 4]])
        scores = loaded(whole).logits[0, :-1].log_softmax(-1).gather(1, whole[0, 1:, None]).squeeze(1)
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts(), strict=True)], scores[-11:].tolist()


SERVED = [family for family in FAMILIES if family.reason is None and family.never_ran is None]


@pytest.mark.parametrize("family", SERVED, ids=lambda family: family.name)
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
        wait_until_scored(ours)
        state = idle_state(ours)
        assert state["span_tokens"] >= 284 and state["span_slots"] < 0.3 * state["span_tokens"]
        assert state["leaked_slots"] == 0 and ours.leak_messages() == []
