"""Policies in real servers: sharing, splits, turns, accounting.

A few policies with a tiny model in the routine suite. ``make test-policies`` serves all of them, at two budgets, with
the demo model and the demo's programs, and writes a table: it sets ``KVEVICT_ALL_POLICIES`` to the file's path.
"""

from __future__ import annotations

import math
import os
import random
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from helpers.decisions import decide
from helpers.dense_attention import accumulated_attention
from helpers.policy_serving import CONFIG, ENV, FLAGS, Served, serve_everything
from helpers.tiny_model import VOCAB_SIZE
from helpers.traffic import assert_all_slots_are_back, generate
from sgl_kvevict.cli.inspect import ask_node, ask_snapshot, asked
from sgl_kvevict.config import LEAST_SHARE_OF_16_BITS
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.policies import LayerView, Signal, build_policy, list_policies

EXAMPLES = Path(__file__).parents[2] / "examples"
TABLE = os.environ.get("KVEVICT_ALL_POLICIES")
INTRODUCTION = """# Every policy in a real server

Written by `make test-policies`: SmolLM2-135M-Instruct on a CPU, chunks of 150 tokens, random retractions. Each row is
one server, in which the demo's frontend program and its chat ran first. Then:

* prefix: a document was cached; tokens of it that were compressed -> token slots they take;
* sharers: eight questions about it at once; most requests that read one span at a time;
* split: a prompt left the document at token 200; tokens that it found in the cache;
* turns: tokens that each turn of a conversation found in the cache;
* 60 random requests followed, 16 at a time; compressions count from the server's start, requests without the demo's;
* leaked: token slots without an owner and complaints of SGLang's checkers, at the end and after a flush.

Left out: `distilled`, the default.

"""


@dataclass(frozen=True)
class Case:
    """A policy with options, served at a budget."""

    policy: str
    budget: float
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        options = [f"{name}={value}" for name, value in self.options.items()]
        return " ".join([self.policy, *options])


ROUTINE = [
    Case("d2o", 0.2),
    Case("chunkkv", 0.2, {"reuse_layers": 2}),
    # a user's own, from examples/policies
    Case("value_aware:value_aware", 0.2, {"window_size": 16}),
]


def all_cases() -> list[Case]:
    """Every policy that has a name, and variants that take another way through the server."""
    names = [info.name for info in list_policies() if info.name not in {"none", "distilled"}]
    cases = [Case(name, budget) for name in names for budget in (0.5, 0.2)]
    variants: list[tuple[str, dict[str, Any]]] = [
        ("chunkkv", {"reuse_layers": 2}),
        ("h2o", {"budget_rule": "all-layers"}),
    ]
    return cases + [Case(name, 0.2, options) for name, options in variants]


@pytest.mark.skipif(TABLE is not None, reason="all policies are served instead")
@pytest.mark.parametrize("case", ROUTINE, ids=str)
def test_policy_serves_a_tiny_model(start, tiny_llama, monkeypatch, tmp_path, case):
    monkeypatch.syspath_prepend(str(EXAMPLES / "policies"))
    rng = random.Random(0)
    document = [rng.randrange(3, VOCAB_SIZE) for _ in range(400)]
    flags = ("--skip-tokenizer-init", "--max-total-tokens", "2500", "--context-length", "1024")
    config = {**CONFIG, "policy": case.policy, "budget": case.budget, "policy_options": case.options}
    endpoint = f"ipc://{tmp_path}/events"
    config["events"] = {"endpoint": endpoint}
    env = {**ENV, "PYTHONPATH": str(EXAMPLES / "policies")}
    server = start(tiny_llama, *flags, *FLAGS, config=config, env=env)
    served = serve_everything(server, str(case), case.budget, document, vocab_size=VOCAB_SIZE)
    assert served.leaked == 0
    if case.policy == "d2o":
        generate(server, document, 0)
        tree = asked(endpoint, 60.0, lambda client: ask_snapshot(client, limit=1000)).tree
        largest = max((node for node in tree.nodes if node.compressed), key=lambda node: node.tokens)
        _, kept, _ = asked(endpoint, 60.0, lambda client: ask_node(client, largest.id, bins=200))
        served_share = torch.frombuffer(bytearray(kept.share), dtype=torch.uint8).view(-1, kept.num_bins) / 255
        share = dense_share(tiny_llama, case, document, kept.start, kept.end, kept.num_bins)
        assert (served_share - share).abs().gt(0.01).float().mean() < 0.01
    server.stop(grace_s=0)


def dense_share(model: Path, case: Case, document: list[int], start: int, end: int, num_bins: int) -> torch.Tensor:
    """What a policy of accumulated attention keeps of the tokens ``[start, end)`` when it sees the attention matrix of
    another implementation. (The range is compressed as a whole; each chunk of the prefill is a node of its own.)
    """
    llama = LlamaForCausalLM.from_pretrained(model, attn_implementation="eager")
    with torch.inference_mode():
        weights = llama(torch.tensor([document]), output_attentions=True).attentions
        keys = torch.randn(len(document) + 1, 4, 16)
    num_tokens = len(document)

    def show(layer: int) -> LayerView:
        sums = accumulated_attention(weights[layer][0], 4)[:, :num_tokens]
        slots = torch.arange(1, num_tokens + 1)
        signals = {Signal.ACCUMULATED_ATTENTION: sums}
        return LayerView(layer, 0, keys, keys, slots, 0.25, signals, num_prompt_tokens=len(document))

    policy = build_policy(case.policy, case.options)
    assert policy is not None
    total = math.ceil(Fraction(str(case.budget)) * num_tokens) * 12
    least = math.ceil(LEAST_SHARE_OF_16_BITS * num_tokens)
    num_last = (least - 4) // 2  # see Compressor.protected
    selection = decide(policy, show, KVGeometry(3, 8, 4, 16, len(document) + 1), total, 4, num_last).selection
    runs = torch.repeat_interleave(selection.keep_lens.flatten().long())
    inside = (selection.indices >= start) & (selection.indices < end)
    cells = runs[inside] * num_bins + (selection.indices[inside].long() - start) * num_bins // (end - start)
    counts = torch.bincount(cells, minlength=12 * num_bins).view(12, num_bins)
    return counts / torch.bincount(torch.arange(end - start) * num_bins // (end - start))


@pytest.mark.skipif(TABLE is None, reason="half an hour: make test-policies")
@pytest.mark.parametrize("case", all_cases(), ids=lambda case: f"{case}-{case.budget}")
def test_policy_serves_the_demo(start, demo_model, monkeypatch, case):
    monkeypatch.syspath_prepend(str(EXAMPLES / "demo"))
    from kvevict_demo.programs import run_branches, run_chat
    from kvevict_demo.questions import BRANCH_QUESTIONS, CHAT_QUESTIONS, system_prompt

    prompt = system_prompt()[:4000]
    document = AutoTokenizer.from_pretrained(demo_model)(prompt).input_ids[:400]
    flags = ("--max-total-tokens", "4000", "--context-length", "2048", "--enable-cache-report", "--enable-metrics")
    config = {**CONFIG, "policy": case.policy, "budget": case.budget, "policy_options": case.options}
    server = start(demo_model, *flags, *FLAGS, config=config, env=ENV)
    branches = run_branches(server.url, prompt, BRANCH_QUESTIONS, lambda: None)
    assert all(answer.text and answer.cached_tokens > 500 for answer in branches)
    turns = run_chat(server.url, prompt, CHAT_QUESTIONS[:3])
    assert all(answer.text and answer.cached_tokens > 500 for answer in turns)
    assert_all_slots_are_back(server)
    server.post("/flush_cache")
    served = serve_everything(server, str(case), case.budget, document, vocab_size=40_000)
    server.stop(grace_s=0)
    assert served.leaked == 0
    add_row(served)


def add_row(served: Served) -> None:
    """Append to the table; its first row comes after an introduction."""
    assert TABLE is not None
    path = Path(TABLE)
    if not path.exists():
        path.write_text(INTRODUCTION + Served.header(), encoding="utf-8")
    with path.open("a", encoding="utf-8") as file:
        file.write(served.row())


def test_every_policy_is_served_or_left_out_for_a_reason():
    names = {info.name for info in list_policies()}
    assert {case.policy for case in all_cases()} == names - {"none", "distilled"}  # see test_distilled.py
