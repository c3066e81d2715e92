"""Scores for questions that nobody has asked yet, from the prefill alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sgl_kvevict.policies import Policy, Rotary, Signal, build_policy, echo
from sgl_kvevict.policies.echo import echo_attention
from sgl_kvevict.policies.scorers import RobustAttentionScorer
from sgl_kvevict.policies.scorers.robust_attention import output_gram

HEAD_DIM, NUM_HEADS, GROUP, LENGTH = 8, 2, 3, 50


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(echo, "BLOCK", 8)
    monkeypatch.setattr(echo, "NUM_BLOCKS", 2)
    monkeypatch.setattr(echo, "NUM_SINKS", 2)


def rotary(scale: float = 1.0) -> Rotary:
    angles = torch.arange(200.0)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.03])
    return Rotary(torch.cat([angles.cos(), angles.sin()], 1) * scale, True)


def text(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Queries and keys before RoPE."""
    generator = torch.Generator().manual_seed(seed)
    queries = 2 * torch.randn(LENGTH, NUM_HEADS * GROUP, HEAD_DIM, generator=generator)
    return queries, 2 * torch.randn(LENGTH, NUM_HEADS, HEAD_DIM, generator=generator)


def expected_echo(queries: Tensor, keys: Tensor) -> Tensor:
    """The definition, query by query: a copy of the text stands two blocks further and reads two blocks and sinks."""
    table = rotary()
    keys = table.apply(keys, torch.arange(LENGTH))
    peaks = torch.zeros(NUM_HEADS, LENGTH)
    for i in range(LENGTH):
        block = i // 8 * 8
        seen = sorted({*range(2), *range(max(block - 8, 0), min(block + 8, LENGTH))})
        query = table.apply(queries[i : i + 1], torch.tensor([i + 16]))[0]
        for head in range(NUM_HEADS * GROUP):
            weights = (keys[seen, head // GROUP] @ query[head] * 0.3).softmax(0)
            peaks[head // GROUP, seen] = torch.maximum(peaks[head // GROUP, seen], weights)
    return peaks


def run_echo(queries: Tensor, keys: Tensor, table: Rotary, begin: int = 0, end: int = LENGTH) -> Tensor:
    positions = torch.arange(LENGTH)
    generator = torch.Generator().manual_seed(1)
    slots = torch.randperm(LENGTH, generator=generator) + 1
    buffer = torch.full((LENGTH + 1, NUM_HEADS, HEAD_DIM), torch.nan)
    buffer[slots] = rotary().apply(keys, positions)
    turned = rotary().apply(queries, positions)[begin:end]
    return echo_attention(turned, buffer, slots[:end], sm_scale=0.3, key_start=0, query_start=begin, rotary=table)


def test_echo_is_what_a_copy_behind_the_text_attends_to() -> None:
    queries, keys = text()
    torch.testing.assert_close(run_echo(queries, keys, rotary()), expected_echo(queries, keys), rtol=1e-4, atol=1e-5)


def test_a_scaled_table_turns_without_scaling() -> None:
    queries, keys = text()
    torch.testing.assert_close(run_echo(queries, keys, rotary(1.2)), run_echo(queries, keys, rotary()))


def test_chunks_at_block_ends_change_nothing() -> None:
    """A chunk sees no later keys, so only chunks that end with a block give the same."""
    queries, keys = text(1)
    whole = run_echo(queries, keys, rotary())
    combined = torch.zeros_like(whole)
    for begin, end in ((0, 16), (16, 40), (40, LENGTH)):
        part = run_echo(queries, keys, rotary(), begin, end)
        combined[:, :end] = torch.maximum(combined[:, :end], part)
    assert torch.equal(combined, whole)


def test_keys_that_no_query_looks_at_score_zero() -> None:
    queries, keys = text(2)
    late = run_echo(queries, keys, rotary(), 40, LENGTH)
    assert bool((late[:, 2:32] == 0).all()) and bool((late[:, 32:] > 0).all()) and bool((late[:, :2] > 0).all())


def policy(name: str, **options: Any) -> Policy:
    built = build_policy(name, options)
    assert built is not None
    return built


def robust_scores(prompt: Any, scorer: RobustAttentionScorer, gram: Tensor) -> Tensor:
    return scorer.score(replace(prompt.observe(0), output_gram=gram)).values


def test_defensive_takes_the_largest_attention_floored_by_its_mean(from_weights: Callable[..., Any]) -> None:
    rows = torch.tensor([[[0.1, 0.5, 0.1, 0.1, 0.2, 0.0, 0.0], [0.1, 0.1, 0.1, 0.6, 0.1, 0.0, 0.0]]]).double()
    prompt = from_weights([rows], tail=2)
    gram = torch.eye(7)[None]
    plain = robust_scores(prompt, RobustAttentionScorer(use_floor=False, use_value_norm=False), gram)
    torch.testing.assert_close(plain, torch.tensor([[0.1, 0.5, 0.1, 0.6, 0.2]]))
    floored = robust_scores(prompt, RobustAttentionScorer(use_value_norm=False), gram)
    torch.testing.assert_close(floored, torch.tensor([[0.3, 0.5, 0.3, 0.6, 0.3]]))


def test_defensive_weighs_by_what_a_value_adds(random_prompt: Callable[..., Any]) -> None:
    prompt = random_prompt(length=30)
    projection = torch.randn(3, 2, 8, 20, generator=torch.Generator().manual_seed(3))  # [KV head, group, head_dim, out]
    gram = output_gram(projection.reshape(6 * 8, 20).t(), 3, 8)
    scores = robust_scores(prompt, RobustAttentionScorer(), gram)
    plain = robust_scores(prompt, RobustAttentionScorer(use_value_norm=False), gram)
    added = torch.einsum("nhd,hgdo->hngo", prompt.values[0][prompt.start : prompt.end], projection)
    torch.testing.assert_close(scores, plain * added.flatten(2).norm(dim=-1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "missing"), [("echo", "echo attention"), ("defensive", "the output projection")])
def test_missing_signals_are_named(random_prompt: Callable[..., Any], name: str, missing: str) -> None:
    with pytest.raises(ValueError, match=f"needs {missing}"):
        policy(name).scorer.score(random_prompt(length=30).observe(0))


def test_what_they_ask_of_the_forward() -> None:
    assert policy("echo").needs == {Signal.ECHO_ATTENTION}
    assert policy("defensive").needs == {Signal.WINDOW_QUERIES, Signal.KEYS, Signal.VALUES, Signal.OUTPUT_GRAM}
    assert Signal.OUTPUT_GRAM not in policy("defensive", use_value_norm=False).needs
