"""Methods for questions that nobody has asked yet, from the prefill alone: echo attention and robust window scores."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_kvevict.policies.options import option
from sgl_kvevict.policies.policy import Policy
from sgl_kvevict.policies.presets.budget import BudgetOptions, budget_rule
from sgl_kvevict.policies.presets.entry import PolicyEntry
from sgl_kvevict.policies.scorers import EchoAttentionScorer, RobustAttentionScorer
from sgl_kvevict.policies.selectors import TopKSelector


@dataclass(frozen=True)
class EchoOptions(BudgetOptions):
    """Options of ``echo``."""

    budget_rule: str = budget_rule("all-layers")


@dataclass(frozen=True)
class DefensiveOptions(BudgetOptions):
    """Options of ``defensive``."""

    budget_rule: str = budget_rule("all-layers")
    window_size: int = option(32, "queries at the end of the prompt whose attention scores tokens", minimum=1)
    use_floor: bool = option(True, "no token counts less than the average one of its head")
    use_value_norm: bool = option(True, "multiply by the norm of the value through the output projection")


def _echo(options: EchoOptions) -> Policy:
    return Policy("echo", EchoAttentionScorer(), options.allocator(), TopKSelector())


def _defensive(options: DefensiveOptions) -> Policy:
    scorer = RobustAttentionScorer(options.window_size, options.use_floor, options.use_value_norm)
    return Policy("defensive", scorer, options.allocator(), TopKSelector())


ECHO = PolicyEntry(
    "echo",
    "what the prompt would attend to if it were read once more, without reading it; one budget for all layers",
    EchoOptions,
    _echo,
)
DEFENSIVE = PolicyEntry(
    "defensive",
    "the largest attention of the last queries, times what a value adds; one budget for all layers",
    DefensiveOptions,
    _defensive,
)
