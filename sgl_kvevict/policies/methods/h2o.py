"""``h2o``: tokens that all queries together attended to most, and the most recent ones.

Source: H2O (arXiv 2306.14048), Sec. 4, Alg. 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sgl_kvevict.policies.budget_options import BudgetOptions
from sgl_kvevict.policies.method import Method, PaperSettings, PaperValue
from sgl_kvevict.policies.options import option
from sgl_kvevict.policies.policy import Policy
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


def _build(options: H2OOptions) -> Policy:
    scorer = AccumulatedAttentionScorer(options.normalize)
    return Policy("h2o", scorer, options.allocator(), HeavyHitterSelector(options.recent_ratio))


METHOD = Method(
    name="h2o",
    summary="tokens that all queries together attended to most, and the most recent ones",
    source="H2O (arXiv 2306.14048), Sec. 4",
    use_when="nothing is known of the questions; costs a second attention",
    options_type=H2OOptions,
    build=_build,
    paper=PaperSettings(
        "H2O (arXiv 2306.14048)",
        (
            PaperValue("recent_ratio", 0.5, "as many recent tokens as heavy hitters: the released code's examples"),
            PaperValue("normalize", "none", "Sec. 4, Alg. 1"),
        ),
    ),
)
