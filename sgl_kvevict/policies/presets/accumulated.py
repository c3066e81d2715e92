"""Methods that score by the attention of all queries: H2O and D2O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sgl_kvevict.policies.mergers import NearestKeyMerger
from sgl_kvevict.policies.options import option
from sgl_kvevict.policies.policy import Policy
from sgl_kvevict.policies.presets.budget import BudgetOptions, budget_rule
from sgl_kvevict.policies.presets.entry import PolicyEntry
from sgl_kvevict.policies.scorers import AccumulatedAttentionScorer
from sgl_kvevict.policies.selectors import HeavyHitterSelector


@dataclass(frozen=True)
class H2OOptions(BudgetOptions):
    """Options of ``h2o``."""

    recent_ratio: float = option(0.5, "share of the budget for the most recent tokens", minimum=0, maximum=1)
    normalize: Literal["none", "queries"] = option(
        "none",
        "sums of attention, or divided by the number of queries that saw the token",
        choices=("none", "queries"),
    )


@dataclass(frozen=True)
class D2OOptions(BudgetOptions):
    """Options of ``d2o``."""

    budget_rule: str = budget_rule("density")
    num_sink_tokens: int = option(4, "first tokens of a path that every head keeps", minimum=0)
    recent_ratio: float = option(
        0.25, "share of the budget for the most recent tokens (N:M = 3:1)", minimum=0, maximum=1
    )
    direction: Literal["causal", "any"] = option(
        "causal",
        "merge evicted tokens into later kept tokens only, so that spans can be split, or into any (paper)",
        choices=("causal", "any"),
    )
    beta: float = option(0.7, "weight of new similarities in the moving threshold", minimum=0, maximum=1)
    threshold: Literal["ema", "none"] = option(
        "ema", "merge what reaches the moving threshold, or everything", choices=("ema", "none")
    )
    threshold_scope: Literal["head", "layer"] = option(
        "head", "one threshold per KV head or per layer", choices=("head", "layer")
    )
    weighting: Literal["similarity", "average"] = option(
        "similarity", "weights of a merge", choices=("similarity", "average")
    )
    match_on: Literal["keys", "values"] = option(
        "keys", "whose cosine similarity decides what merges where", choices=("keys", "values")
    )

    def merger(self) -> NearestKeyMerger:
        """The merger these options describe."""
        return NearestKeyMerger(
            self.beta, self.direction, self.threshold, self.threshold_scope, self.weighting, self.match_on
        )


def _h2o(options: H2OOptions) -> Policy:
    return Policy(
        "h2o",
        AccumulatedAttentionScorer(options.normalize),
        options.allocator(),
        HeavyHitterSelector(options.recent_ratio),
    )


def _d2o(options: D2OOptions) -> Policy:
    return Policy(
        "d2o",
        AccumulatedAttentionScorer(),
        options.allocator(),
        HeavyHitterSelector(options.recent_ratio),
        options.merger(),
        num_sink_tokens=options.num_sink_tokens,
    )


H2O = PolicyEntry(
    "h2o", "tokens that all queries together attended to most, and the most recent ones", H2OOptions, _h2o
)
D2O = PolicyEntry(
    "d2o",
    "H2O's tokens, more of them in layers of dense attention; evicted ones merge into similar kept ones",
    D2OOptions,
    _d2o,
)
