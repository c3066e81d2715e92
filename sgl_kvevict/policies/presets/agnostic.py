"""Cheap methods that look at no question: key norm, key difference, expected attention, random."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_kvevict.policies.options import option
from sgl_kvevict.policies.policy import Policy
from sgl_kvevict.policies.presets.budget import BudgetOptions
from sgl_kvevict.policies.presets.entry import PolicyEntry
from sgl_kvevict.policies.scorers import (
    ExpectedAttentionScorer,
    KeyDifferenceScorer,
    KeyNormScorer,
    RandomScorer,
)
from sgl_kvevict.policies.selectors import TopKSelector


@dataclass(frozen=True)
class ExpectedAttentionOptions(BudgetOptions):
    """Options of ``expected-attention``."""

    num_future_positions: int = option(512, "positions after the prompt whose queries are expected", minimum=1)
    num_sink_tokens: int = option(4, "first tokens of a path that every head keeps", minimum=0)
    use_covariance: bool = option(True, "with the second moment of the queries")
    use_value_norm: bool = option(True, "multiply by the norm of the value")
    epsilon: float = option(0.0, "added to the attention before that", minimum=0)


@dataclass(frozen=True)
class RandomOptions(BudgetOptions):
    """Options of ``random``."""

    seed: int = option(0, "of the random numbers", minimum=0)


def _knorm(options: BudgetOptions) -> Policy:
    return Policy("knorm", KeyNormScorer(), options.allocator(), TopKSelector())


def _keydiff(options: BudgetOptions) -> Policy:
    return Policy("keydiff", KeyDifferenceScorer(), options.allocator(), TopKSelector())


def _expected_attention(options: ExpectedAttentionOptions) -> Policy:
    scorer = ExpectedAttentionScorer(
        options.num_future_positions,
        options.num_sink_tokens,
        options.use_covariance,
        options.use_value_norm,
        options.epsilon,
    )
    return Policy(
        "expected-attention",
        scorer,
        options.allocator(),
        TopKSelector(),
        num_sink_tokens=options.num_sink_tokens,
    )


def _random(options: RandomOptions) -> Policy:
    return Policy("random", RandomScorer(options.seed), options.allocator(), TopKSelector())


KNORM = PolicyEntry("knorm", "keys with the smallest norm", BudgetOptions, _knorm)
KEYDIFF = PolicyEntry("keydiff", "keys least like the average key", BudgetOptions, _keydiff)
EXPECTED_ATTENTION = PolicyEntry(
    "expected-attention",
    "tokens that queries distributed like the prompt's are expected to attend to",
    ExpectedAttentionOptions,
    _expected_attention,
)
RANDOM = PolicyEntry("random", "a random set: the control", RandomOptions, _random)
