"""Attention matching beside its definition, computed query by query in float64, and what it is for."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sgl_kvevict.config import KVEvictConfig, parse_config
from sgl_kvevict.errors import ConfigError
from sgl_kvevict.policies import build_policy, configured_policy
from sgl_kvevict.policies.attention_matcher import (
    CAUSAL_BLOCK,
    HIGHEST_WEIGHT,
    LOWEST_WEIGHT,
    RIDGE,
    AttentionMatcher,
)
from sgl_kvevict.policies.parts import Fitted

HEADS, TOKENS, QUERIES, HEAD_DIM = 3, 150, 400, 8


class Problem:
    """Random keys with neighbours that are alike, queries about some of them, values, and a selection."""

    def __init__(self, share: float = 0.2, *, is_causal: bool = True) -> None:
        torch.manual_seed(5)
        smooth = torch.randn(HEADS, TOKENS // 5, HEAD_DIM).repeat_interleave(5, 1)
        keys = smooth + 0.4 * torch.randn(HEADS, TOKENS, HEAD_DIM)
        self.values = torch.randn(HEADS, TOKENS // 5, HEAD_DIM).repeat_interleave(5, 1)
        self.values = self.values + 0.3 * torch.randn(HEADS, TOKENS, HEAD_DIM)
        self.rest = torch.rand(HEADS, QUERIES, 1)
        """What else a query pays attention to."""
        queries = keys[:, torch.randint(TOKENS, (QUERIES,))] + 0.5 * torch.randn(HEADS, QUERIES, HEAD_DIM)
        weights = (queries @ keys.transpose(1, 2)).exp()
        self.paid = weights / (weights.sum(2, keepdim=True) * (1 + self.rest))
        best = self.paid.square().sum(1).topk(int(share * TOKENS), dim=1).indices
        self.kept = torch.zeros(HEADS, TOKENS, dtype=torch.bool).scatter_(1, best, True)
        self.fitter = AttentionMatcher(is_causal=is_causal)
        self.block = self.fitter.block_len(TOKENS)

    def products(self) -> Tensor:
        """[HEADS, num_blocks, block, block]."""
        num_blocks = -(-TOKENS // self.block)
        padded = torch.nn.functional.pad(self.paid, (0, num_blocks * self.block - TOKENS))
        blocks = padded.view(HEADS, QUERIES, num_blocks, self.block).transpose(1, 2)
        return blocks.transpose(2, 3) @ blocks

    def fit(self) -> Fitted:
        return self.fitter.fit(self.products(), self.values, self.kept)

    def answers(self, fitted: Fitted | None) -> Tensor:
        """[HEADS, QUERIES, HEAD_DIM], of queries that see what is kept, and what else there is (whose values are 0)."""
        if fitted is None:
            weights, values = self.paid * self.kept[:, None], self.values
        else:
            factors = torch.where(fitted.is_fitted, fitted.biases.exp(), 1.0) * self.kept
            weights = self.paid * factors[:, None]
            values = torch.where(fitted.is_fitted[..., None], fitted.values, self.values)
        others = 1 - self.paid.sum(2, keepdim=True)
        return (weights @ values) / (weights.sum(2, keepdim=True) + others)


def slow_fit(paid: Tensor, values: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and values of one head and block, float64: many small steps for the one, equations for the other."""
    mine, mass = paid[:, kept], paid.sum(1)
    scale = mine.square().sum(0).mean()
    weights = torch.ones(int(kept.sum()), dtype=torch.float64)
    step = 1 / (torch.linalg.matrix_norm(mine, 2) ** 2 + RIDGE * scale)
    for _ in range(20_000):
        gradient = mine.T @ (mine @ weights - mass) + RIDGE * scale * (weights - 1)
        weights = (weights - step * gradient).clamp(LOWEST_WEIGHT, HIGHEST_WEIGHT)
    left = mine * weights
    ridge = RIDGE * left.square().sum(0).mean()
    rows = torch.cat([left, ridge.sqrt() * torch.eye(len(weights), dtype=torch.float64)])
    wanted = torch.cat([paid @ values, ridge.sqrt() * values[kept]])
    return weights.log(), torch.linalg.lstsq(rows, wanted).solution


@pytest.mark.parametrize("is_causal", [True, False])
def test_every_block_is_the_solution_of_its_least_squares(is_causal: bool) -> None:
    problem = Problem(is_causal=is_causal)
    fitted = problem.fit()
    assert torch.equal(fitted.is_fitted, problem.kept)
    for head in range(HEADS):
        for first in range(0, TOKENS, problem.block):
            part = slice(first, min(first + problem.block, TOKENS))
            kept = problem.kept[head, part]
            if not kept.any():
                continue
            paid, values = problem.paid[head, :, part].double(), problem.values[head, part].double()
            biases, rows = slow_fit(paid, values, kept)
            assert (fitted.biases[head, part][kept] - biases).abs().max() < 2e-2
            assert (fitted.values[head, part][kept] - rows).abs().max() < 2e-2


def test_the_answers_of_readers_come_back() -> None:
    """The squared error of what readers get falls, and more where the whole range is one block."""
    errors = {}
    for is_causal in (True, False):
        problem = Problem(is_causal=is_causal)
        full = problem.paid @ problem.values
        for name, fitted in (("selected", None), ("fitted", problem.fit())):
            errors[name, is_causal] = float((problem.answers(fitted) - full).square().sum())
    assert errors["fitted", True] < 0.8 * errors["selected", True]
    assert errors["fitted", False] < 0.95 * errors["fitted", True]


def test_a_value_holds_nothing_of_a_later_block() -> None:
    """Other tokens, other attention to them, another selection behind a block: the block's fit has the same bits."""
    problem = Problem()
    before = problem.fit()
    changed = Problem()
    behind = slice(CAUSAL_BLOCK, None)
    changed.values[:, behind] = torch.randn(changed.values[:, behind].shape)
    changed.paid[:, :, behind] *= torch.rand(1, QUERIES, 1)
    changed.kept[:, behind] = changed.kept[:, behind].roll(1, 1)
    after = changed.fit()
    assert torch.equal(before.values[:, :CAUSAL_BLOCK], after.values[:, :CAUSAL_BLOCK])
    assert torch.equal(before.biases[:, :CAUSAL_BLOCK], after.biases[:, :CAUSAL_BLOCK])
    assert not torch.equal(before.values[:, behind], after.values[:, behind])


@pytest.mark.parametrize("num_tokens", [CAUSAL_BLOCK - 1, CAUSAL_BLOCK, 2 * CAUSAL_BLOCK])
def test_ranges_of_whole_blocks_and_of_less_than_one(num_tokens: int) -> None:
    """Values lie as the arena has them: heads next to each other."""
    problem = Problem()
    block = problem.fitter.block_len(num_tokens)
    parts = problem.paid[:, :, :num_tokens].reshape(HEADS, QUERIES, -1, block).transpose(1, 2)
    values = problem.values[:, :num_tokens].transpose(0, 1).contiguous().transpose(0, 1)
    fitted = problem.fitter.fit(parts.transpose(2, 3) @ parts, values, problem.kept[:, :num_tokens])
    whole = problem.fit()
    if num_tokens >= CAUSAL_BLOCK:
        torch.testing.assert_close(fitted.values, whole.values[:, :num_tokens], rtol=1e-3, atol=1e-3)
    assert torch.equal(fitted.is_fitted, problem.kept[:, :num_tokens])


def test_heads_that_keep_more_than_half_are_left_alone() -> None:
    problem = Problem()
    problem.kept[1] = torch.arange(TOKENS) < TOKENS // 2 + 1
    problem.kept[2] = torch.arange(TOKENS) < TOKENS // 2
    fitted = problem.fit()
    assert fitted.is_fitted.any(1).tolist() == [True, False, True]


def test_what_is_kept_whole_stays_as_it_is() -> None:
    """Nothing is missing from a block, so weights are 1 and values those that are there."""
    problem = Problem()
    problem.kept[:] = False
    problem.kept[:, :CAUSAL_BLOCK] = True
    fitted = problem.fit()
    assert fitted.biases[:, :CAUSAL_BLOCK].abs().max() < 1e-3
    assert (fitted.values - problem.values)[:, :CAUSAL_BLOCK].abs().max() < 1e-2


@pytest.mark.parametrize("wrong", [0.0, math.nan, math.inf, 1e-42])
def test_blocks_that_nobody_looked_at_or_that_cannot_be_solved(wrong: float) -> None:
    """Finite numbers, or the entries are left as they are; other blocks are what they would be."""
    problem = Problem()
    want = problem.fit()
    products = problem.products()
    products[1, 0] = wrong
    fitted = problem.fitter.fit(products, problem.values, problem.kept)
    good = fitted.is_fitted
    assert fitted.values[good].isfinite().all() and fitted.biases[good].isfinite().all()
    assert good[0].equal(problem.kept[0]) and good[1, CAUSAL_BLOCK:].equal(problem.kept[1, CAUSAL_BLOCK:])
    assert torch.equal(fitted.values[0], want.values[0])
    if wrong == 0.0:
        assert (fitted.values - problem.values)[1, :CAUSAL_BLOCK].abs().max() < 1e-3
    elif not math.isfinite(wrong):
        assert not good[1, :CAUSAL_BLOCK].any()


def test_the_configured_policy_has_the_fitter_that_was_asked_for() -> None:
    """Off by default; "causal" unless "range" is asked for; resolving twice changes nothing."""
    assert configured_policy(KVEvictConfig())[1].fitter is None
    config, policy = configured_policy(KVEvictConfig(fit=True))
    assert policy.fitter == AttentionMatcher(is_causal=True)
    assert configured_policy(config)[1] == policy
    ranged = KVEvictConfig(policy="reconstruction", fit=True, fit_scope="range")
    assert configured_policy(ranged)[1].fitter == AttentionMatcher(is_causal=False)


@pytest.mark.parametrize("policy", ["none", "snapkv", "d2o", "d2o@paper"])
def test_policies_without_passes_cannot_be_fitted(policy: str) -> None:
    with pytest.raises(ConfigError, match="fit: got true for policy"):
        configured_policy(KVEvictConfig(policy=policy, fit=True))


def test_a_policy_that_merges_or_is_not_read_has_no_fitter() -> None:
    """Also where somebody builds one of their own."""
    for name, why in (("d2o", "merges"), ("snapkv", "a fit needs scoring passes")):
        policy = build_policy(name, {})
        with pytest.raises(ConfigError, match=why):
            replace(policy, fitter=AttentionMatcher())


@pytest.mark.parametrize("values", [{"fit": 1}, {"fit_scope": "all"}])
def test_bad_values_are_named(values: dict[str, object]) -> None:
    (name,) = values
    with pytest.raises(ConfigError, match=f"{name}: got"):
        parse_config(values, "test")
