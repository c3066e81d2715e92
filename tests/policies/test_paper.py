"""Golden numbers of specs/*.md, with the options of examples/papers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.decisions import Run, built
from sgl_kvevict.config import parse_config, read_config_file
from sgl_kvevict.policies import Policy

FOLDER = Path(__file__).parents[2] / "examples" / "papers"


def policy_of(paper: str, name: str | None = None, **options: Any) -> Policy:
    """The policy of a paper's configuration, or another one with its options; ``options`` win."""
    config = parse_config(read_config_file(FOLDER / f"{paper}.json"), paper)
    return built(name or config.policy, **(config.policy_options | options))


def stored(prompt: Any, kept: Run, policy: Policy, budget: int) -> list[list[list[int]]]:
    """Positions that every head stores of ``budget`` entries, which count the tail: what was kept, and the tail."""
    num_tail = prompt.length - prompt.end
    decision = prompt.run(policy, (budget - num_tail) * prompt.geometry.num_runs)
    tail = list(range(prompt.end, prompt.length))
    return [[head + tail for head in layer] for layer in kept(decision)]


def test_streaming_llm(random_prompt: Run, kept: Run) -> None:
    """specs/ada_kv.md 9.26."""
    prompt = random_prompt(length=100, tail=1, num_queries=8)
    heads = stored(prompt, kept, policy_of("streaming-llm"), 10)
    assert all(head == [0, 1, 2, 3, *range(94, 100)] for layer in heads for head in layer)


def test_h2o_on_uniform_attention(from_weights: Run, kept: Run) -> None:
    """specs/ada_kv.md 9.24: column sums fall, so the heavy hitters are the first tokens."""
    rows = torch.tril(torch.ones(6, 6, dtype=torch.float64))
    prompt = from_weights([(rows / rows.sum(1, keepdim=True))[None]], tail=1)
    assert stored(prompt, kept, policy_of("h2o"), 4) == [[[0, 1, 4, 5]]]


def test_ada_snapkv(make_prompt: Run, kept: Run) -> None:
    """specs/ada_kv.md 9.17: b = 10 with a window of 4; lengths (9, 10, 11)."""
    head = torch.arange(3.0)[None, :, None]
    phase = torch.arange(1.0, 25)[:, None, None] * torch.arange(1.0, 5) * (head + 1)
    keys = torch.sin(phase.double() * 0.37) * (1 + head)
    queries = torch.cos(phase.double() * 0.21) * (1 + 0.5 * head)
    prompt = make_prompt([keys.float()], [queries.float()], tail=4, window=4)
    window = [20, 21, 22, 23]
    assert stored(prompt, kept, policy_of("ada-kv", window_size=4, kernel_size=3), 10) == [
        [[4, 5, 12, 13, 14, *window], [3, 4, 5, 6, 12, 13, *window], [2, 3, 4, 13, 16, 17, 18, *window]]
    ]


@pytest.mark.parametrize(("paper", "name"), [("pyramidkv", "pyramidkv"), ("ada-kv", "ada-pyramidkv")])
def test_pyramids_spend_the_papers_budget(random_prompt: Run, kept: Run, paper: str, name: str) -> None:
    prompt = random_prompt(length=80, tail=8)
    heads = stored(prompt, kept, policy_of(paper, name, window_size=8), 20)
    sizes = [sum(map(len, layer)) for layer in heads]
    assert sum(sizes) == 3 * 3 * 20 and sizes[0] > sizes[1] > sizes[2]


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
    assert stored(prompt, kept, policy_of("k-vec", **small), 3) == [[[0, 4, 7], [0, 6, 7]], [[0, 4, 7], [3, 6, 7]]]


def test_k_vec_protects_a_share_of_the_whole_budget(from_weights: Run, kept: Run) -> None:
    """Eq. 16: beta * B counts the window: of B = 4 with a window of 1 two tokens are sure, not one."""
    prompt = from_weights([FIXTURE] * 2, tail=1)
    options = {"base_window": 1, "extended_window": 1, "rescored_share": 0.0, "kernel_size": 1, "bonus": 50.0}
    half = stored(prompt, kept, policy_of("k-vec", protected_share=0.5, **options), 4)
    assert all({0, 4} <= set(head) for layer in half for head in layer)  # both heads' own best
    none = stored(prompt, kept, policy_of("k-vec", protected_share=0.0, **options), 4)
    assert any(4 not in head for layer in none for head in layer)


def test_k_vec_spread_counts_the_tokens_behind_the_range(from_weights: Run) -> None:
    """Eq. 10: the standard deviation over all tokens. Head 1 is flat in the range and peaks behind it."""
    rows = torch.tensor([[[0.30, 0.20, 0.30, 0.20, 0.0]], [[0.05, 0.05, 0.05, 0.05, 0.80]]], dtype=torch.float64)
    rows = torch.cat((rows[:, :, [1, 0, 3, 2, 4]], rows), dim=1)
    rows[:, 0, 4] = 0.0
    rows[:, 0] /= rows[:, 0].sum(-1, keepdim=True)
    options = {"base_window": 1, "extended_window": 2, "rescored_share": 0.5, "kernel_size": 1}
    policy = policy_of("k-vec", **options)
    prompt = from_weights([rows], tail=1)
    scores = policy.scorer.score(prompt.show(0)).values
    torch.testing.assert_close(scores[1], rows[1, 1, :4].float(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(scores[0], rows[0, :, :4].mean(0).float(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("num_heads", "rescored"), [(1, 0), (2, 1), (3, 1), (4, 2), (8, 3), (16, 6), (32, 12)])
def test_k_vec_rescores_three_of_eight_heads(num_heads: int, rescored: int) -> None:
    scorer = policy_of("k-vec").scorer
    assert scorer.num_rescored(num_heads) == rescored  # type: ignore[attr-defined]
    assert math.isclose(rescored, 0.375 * num_heads, abs_tol=0.5)


def test_k_vec_says_what_is_left_without_effect() -> None:
    policy = policy_of("k-vec")
    assert policy.scorer.caution(3) is None and policy.scorer.caution(8) is None
    assert "of 1 KV heads is 0: no head looks further back" in str(policy.scorer.caution(1))
    every = policy_of("k-vec", rescored_share=1.0)
    assert "of 8 KV heads is 8: every head looks further back" in str(every.scorer.caution(8))
    assert policy_of("k-vec", rescored_share=0.0).scorer.caution(1) is None  # switched off
    assert policy_of("snapkv").scorer.caution(1) is None
