"""``NAME@paper``: what it sets, and the golden numbers of specs/*.md through the sizes a server would use."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sgl_kvevict.config import KVEvictConfig
from sgl_kvevict.errors import ConfigError
from sgl_kvevict.policies import (
    Policy,
    RangeScores,
    build_policy,
    configured_policy,
    list_policies,
)
from sgl_kvevict.policies.by_name import papers
from sgl_kvevict.policies.methods.chunkkv import ChunkKV, ChunkSelector

Run = Callable[..., Any]
PAPER = papers()


def resolve(name: str, budget: float | int = 0.2, **values: Any) -> tuple[KVEvictConfig, Policy]:
    config, policy = configured_policy(KVEvictConfig(policy=name, budget=budget, **values))
    assert policy is not None
    return config, policy


def stored(prompt: Any, kept: Run, name: str, budget: int, **options: Any) -> list[list[list[int]]]:
    """Positions that every head of a served prompt stores: what was kept of the range, and the tail."""
    config, policy = resolve(name, budget, policy_options=options)
    assert config.tail_tokens == prompt.length - prompt.end
    slots = config.num_slots(prompt.end)
    decision = prompt.run(policy, slots * prompt.geometry.num_runs, min(config.sink_tokens, slots))
    tail = list(range(prompt.end, prompt.length))
    return [[head + tail for head in layer] for layer in kept(decision)]


@pytest.mark.parametrize("name", PAPER)
def test_one_word_sets_options_tail_and_budget(name: str) -> None:
    config, policy = resolve(f"{name}@paper")
    assert (config.policy, policy.name) == (name, name)
    assert {value.name: config.policy_options[value.name] for value in PAPER[name].options} == {
        value.name: value.value for value in PAPER[name].options
    }
    kept = {"snapkv": 32, "pyramidkv": 32, "ada-snapkv": 32, "ada-pyramidkv": 32, "k-vec": 16}
    assert (config.tail_tokens, config.budget_includes_tail, config.sink_tokens) == (kept.get(name, 1), True, 0)
    assert configured_policy(config) == (config, policy)  # what is spelled out stays as it is
    assert build_policy(f"{name}@paper", {}) == policy
    assert all(value.source for value in PAPER[name].options)


def test_what_is_given_beside_it_wins() -> None:
    config, policy = resolve(
        "d2o@paper", tail_tokens=8, sink_tokens=2, policy_options={"direction": "causal", "budget_rule": "uniform"}
    )
    assert (config.tail_tokens, config.sink_tokens, config.budget_includes_tail) == (8, 2, True)
    assert policy.splittable
    assert "variance_norm" not in config.policy_options  # it has no effect with budget_rule="uniform"
    window, _ = resolve("snapkv@paper", policy_options={"window_size": 16})
    assert window.tail_tokens == 16  # the tail is the window


def test_methods_without_settings_and_unknown_names_are_refused() -> None:
    names = {info.name for info in list_policies()} - set(PAPER)
    assert "random" in names and "none" in names
    for name in names:
        with pytest.raises(ConfigError, match=rf"policy: got '{name}@paper'; allowed with @paper: streaming-llm@paper"):
            configured_policy(KVEvictConfig(policy=f"{name}@paper"))
    with pytest.raises(ConfigError, match="policy: got 'd2o@code'; allowed: none, "):
        build_policy("d2o@code", {})
    with pytest.raises(ConfigError, match="policy: module 'package@paper' of"):
        build_policy("package@paper:factory", {})


def test_budgets_count_the_tail_as_papers_count_the_window() -> None:
    config, _ = resolve("snapkv@paper", 128)
    assert config.num_slots(1000) == 96 and config.num_slots(50) == 50
    with pytest.raises(ConfigError, match=r"budget: got 32, which includes the tail of tail_tokens=32; .* >= 33"):
        resolve("snapkv@paper", 32)
    share, _ = resolve("snapkv@paper", 0.2)
    assert share.num_slots(968) + 32 == 200  # a fifth of a prompt of 1,000
    assert share.num_slots(968) + share.num_slots(500, start=968) + 32 == 300  # and of 1,500 after another turn
    assert share.num_slots(64) == 1  # 0.2 * 96 - 32 is nothing
    whole, _ = resolve("snapkv@paper", 1.0)
    assert whole.num_slots(968) == 968 and whole.num_slots(500, start=968) == 500


def test_streaming_llm(random_prompt: Run, kept: Run) -> None:
    """specs/ada_kv.md 9.26."""
    prompt = random_prompt(length=100, tail=1, num_queries=8)
    heads = stored(prompt, kept, "streaming-llm@paper", 10)
    assert all(head == [0, 1, 2, 3, *range(94, 100)] for layer in heads for head in layer)


def test_h2o_on_uniform_attention(from_weights: Run, kept: Run) -> None:
    """specs/ada_kv.md 9.24: column sums fall, so the heavy hitters are the first tokens."""
    rows = torch.tril(torch.ones(6, 6, dtype=torch.float64))
    prompt = from_weights([(rows / rows.sum(1, keepdim=True))[None]], tail=1)
    assert stored(prompt, kept, "h2o@paper", 4) == [[[0, 1, 4, 5]]]


def test_ada_snapkv(make_prompt: Run, kept: Run) -> None:
    """specs/ada_kv.md 9.17: b = 10 with a window of 4; lengths (9, 10, 11)."""
    head = torch.arange(3.0)[None, :, None]
    phase = torch.arange(1.0, 25)[:, None, None] * torch.arange(1.0, 5) * (head + 1)
    keys = torch.sin(phase.double() * 0.37) * (1 + head)
    queries = torch.cos(phase.double() * 0.21) * (1 + 0.5 * head)
    prompt = make_prompt([keys.float()], [queries.float()], tail=4, window=4)
    window = [20, 21, 22, 23]
    assert stored(prompt, kept, "ada-snapkv@paper", 10, window_size=4, kernel_size=3) == [
        [[4, 5, 12, 13, 14, *window], [3, 4, 5, 6, 12, 13, *window], [2, 3, 4, 13, 16, 17, 18, *window]]
    ]


@pytest.mark.parametrize("name", ["pyramidkv@paper", "ada-pyramidkv@paper"])
def test_pyramids_spend_the_papers_budget(random_prompt: Run, kept: Run, name: str) -> None:
    prompt = random_prompt(length=80, tail=8)
    heads = stored(prompt, kept, name, 20, window_size=8)
    sizes = [sum(map(len, layer)) for layer in heads]
    assert sum(sizes) == 3 * 3 * 20 and sizes[0] > sizes[1] > sizes[2]


def printed_chunks(tokens: list[float], window: int, chunk: int, budget: int) -> set[int]:
    """Algorithm 1 of ChunkKV as printed, over all tokens; as a set."""
    sums = [sum(tokens[i : i + chunk]) for i in range(0, len(tokens), chunk)]
    best = sorted(sorted(range(len(sums)), key=lambda i: (-sums[i], i))[: budget // chunk])
    chosen = [t for i in best for t in range(i * chunk, min((i + 1) * chunk, len(tokens)))]
    return {*chosen[: budget - window], *range(len(tokens) - window, len(tokens))}


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (8, set(range(12, 20))),
        (10, {12, 13, 14, 15, 16, 17, 18, 19}),
        (12, {0, 1, 2, 3, *range(12, 20)}),
        (14, {0, 1, 2, 3, *range(12, 20)}),
        (16, {*range(8), *range(12, 20)}),
    ],
)
def test_chunkkv_worked_selection(budget: int, expected: set[int]) -> None:
    """specs/chunkkv.md T1, paper mode: three window tokens in the range, the last one behind it."""
    tokens = [5, 0, 0, 0, 1, 1, 1, 1, 0, 0, 3, 0, 2, 2, 2, 0, 3, 3, 3, 3]
    assert printed_chunks([float(t) for t in tokens], 4, 4, budget) == expected
    scores = RangeScores(torch.tensor(tokens[:-1], dtype=torch.float32)[None, None], None, None, 0, 3, 1)
    mask = ChunkSelector(ChunkKV(chunk_length=4, mode="paper")).select(scores, torch.tensor([[budget - 4]]))
    ours = {*mask[0, 0].nonzero().flatten().tolist(), 19}
    assert expected <= ours and len(ours) == budget


@pytest.mark.parametrize("seed", range(4))
def test_chunkkv_keeps_what_algorithm_1_prints(random_prompt: Run, kept: Run, seed: int) -> None:
    prompt = random_prompt(seed, length=200, tail=1, window=32, num_layers=2)
    exact = random_prompt(seed, length=200, tail=32, window=32, num_layers=2)
    ours = stored(prompt, kept, "chunkkv@paper", 64)
    config, policy = resolve("chunkkv", 32, sink_tokens=0)
    in_range = kept(exact.run(policy, config.num_slots(exact.end) * 6))
    differ = 0
    for layer in range(2):
        rows = prompt.weights(layer)[0][:, -32:].sum(1).view(3, 2, -1).mean(1)
        for head in range(3):
            printed = printed_chunks(rows[head].tolist(), 32, 10, 64)
            assert printed <= set(ours[layer][head]) and len(ours[layer][head]) == 64
            differ += not printed <= {*in_range[layer][head], *range(168, 200)}
    assert differ  # mode="exact" keeps something else


def test_chunkkv_as_printed_needs_the_window_in_the_range() -> None:
    with pytest.raises(ConfigError, match=r"tail_tokens: got 32 .* 1 to 31 .* window_size=32 tokens too"):
        resolve("chunkkv", policy_options={"mode": "paper"})
    assert resolve("chunkkv", tail_tokens=31, policy_options={"mode": "paper"})[1].max_tail_tokens == 31
    assert resolve("chunkkv")[1].max_tail_tokens is None
    with pytest.raises(ConfigError, match="mode: got 'paper' for policy 'chunkkv' with keep_window=False"):
        build_policy("chunkkv", {"mode": "paper", "keep_window": False})


FIXTURE = torch.tensor(
    [
        [[0.30, 0.10, 0.15, 0.10, 0.10, 0.15, 0.10, 0], [0.40, 0.05, 0.10, 0.05, 0.20, 0.05, 0.05, 0.10]],
        [[0.01, 0.02, 0.03, 0.30, 0.04, 0.25, 0.35, 0], [0.15, 0.12, 0.13, 0.11, 0.14, 0.12, 0.11, 0.12]],
    ],
    dtype=torch.float64,
)


def test_k_vec_golden_layers(from_weights: Run, kept: Run) -> None:
    """specs/kvec.md T2, SnapKV mode, B = 3, the window the tail."""
    prompt = from_weights([FIXTURE] * 2, tail=1)
    small = {"base_window": 1, "extended_window": 2, "rescored_share": 0.5, "protected_share": 0.5, "kernel_size": 1}
    assert stored(prompt, kept, "k-vec@paper", 3, **small) == [[[0, 4, 7], [0, 6, 7]], [[0, 4, 7], [3, 6, 7]]]


def test_k_vec_protects_a_share_of_the_whole_budget(from_weights: Run, kept: Run) -> None:
    """Eq. 16: beta * B counts the window: of B = 4 with a window of 1 two tokens are sure, not one."""
    prompt = from_weights([FIXTURE] * 2, tail=1)
    options = {"base_window": 1, "extended_window": 1, "rescored_share": 0.0, "kernel_size": 1, "bonus": 50.0}
    half = stored(prompt, kept, "k-vec@paper", 4, protected_share=0.5, **options)
    assert all({0, 4} <= set(head) for layer in half for head in layer)  # both heads' own best
    none = stored(prompt, kept, "k-vec@paper", 4, protected_share=0.0, **options)
    assert any(4 not in head for layer in none for head in layer)


def test_k_vec_spread_counts_the_tokens_behind_the_range(from_weights: Run) -> None:
    """Eq. 10: the standard deviation over all tokens. Head 1 is flat in the range and peaks behind it."""
    rows = torch.tensor([[[0.30, 0.20, 0.30, 0.20, 0.0]], [[0.05, 0.05, 0.05, 0.05, 0.80]]], dtype=torch.float64)
    rows = torch.cat((rows[:, :, [1, 0, 3, 2, 4]], rows), dim=1)
    rows[:, 0, 4] = 0.0
    rows[:, 0] /= rows[:, 0].sum(-1, keepdim=True)
    options = {"base_window": 1, "extended_window": 2, "rescored_share": 0.5, "kernel_size": 1}
    policy = resolve("k-vec@paper", policy_options=options)[1]
    prompt = from_weights([rows], tail=1)
    scores = policy.scorer.score(prompt.show(0)).values
    torch.testing.assert_close(scores[1], rows[1, 1, :4].float(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(scores[0], rows[0, :, :4].mean(0).float(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("num_heads", "rescored"), [(1, 0), (2, 1), (3, 1), (4, 2), (8, 3), (16, 6), (32, 12)])
def test_k_vec_rescores_three_of_eight_heads(num_heads: int, rescored: int) -> None:
    scorer = resolve("k-vec@paper")[1].scorer
    assert scorer.num_rescored(num_heads) == rescored  # type: ignore[attr-defined]
    assert math.isclose(rescored, 0.375 * num_heads, abs_tol=0.5)


def test_k_vec_says_what_is_left_without_effect() -> None:
    policy = resolve("k-vec")[1]
    assert policy.caution(3) is None and policy.caution(8) is None
    assert "of 1 KV heads is 0: no head looks further back" in str(policy.caution(1))
    every = resolve("k-vec", policy_options={"rescored_share": 1.0})[1]
    assert "of 8 KV heads is 8: every head looks further back" in str(every.caution(8))
    assert resolve("k-vec", policy_options={"rescored_share": 0.0})[1].caution(1) is None  # switched off
    assert resolve("snapkv")[1].caution(1) is None
