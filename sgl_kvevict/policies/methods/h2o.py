"""``h2o``: tokens with the largest attention summed over all queries, and the most recent ones."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from sgl_kvevict.policies.options import BudgetOptions
from sgl_kvevict.policies.policy import Policy
from sgl_kvevict.policies.scorers import AccumulatedAttentionScorer
from sgl_kvevict.policies.selectors import HeavyHitterSelector


class H2O(BudgetOptions):
    """``h2o``."""

    name = "h2o"
    summary = "tokens that all queries together attended to most, and the most recent ones"
    source = "H2O (arXiv 2306.14048), Sec. 4"
    use_when = "nothing is known of the questions; costs a second attention"

    recent_ratio: float = Field(0.5, ge=0, le=1, description="share of the budget for the most recent tokens")
    normalize: Literal["none", "queries"] = Field(
        "none", description="sums of attention, or divided by the number of queries that saw the token"
    )

    def build(self) -> Policy:
        return self.policy(AccumulatedAttentionScorer(self.normalize), HeavyHitterSelector(self.recent_ratio))
