"""``snapkv``: tokens that the prompt's last queries attend to, the same number in every head.

Grouped queries and pooling follow Ada-KV (arXiv 2407.11550), Alg. 2. ``pyramidkv``, ``ada-snapkv`` and
``ada-pyramidkv`` are this policy with other budget rules: more entries in shallow layers (:class:`PyramidLayers`), more
for heads of diffuse attention (:class:`AdaptiveHeads`), and both.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from sgl_kvevict.policies.options import BudgetOptions, BudgetRule, OddInt
from sgl_kvevict.policies.policy import Policy
from sgl_kvevict.policies.scorers import WindowAttentionScorer

WindowSize = Annotated[int, Field(ge=1, description="queries at the end of the prompt whose attention scores tokens")]


class SnapKV(BudgetOptions):
    """``snapkv``."""

    name = "snapkv"
    summary = "tokens that the prompt's last queries attend to, the same number in every head"
    source = "SnapKV (arXiv 2404.14469); Ada-KV (arXiv 2407.11550), Alg. 2"
    use_when = "the question ends the prompt"

    window_size: WindowSize = 32
    kernel_size: OddInt = Field(7, ge=1, le=127, description="width of the pool along the tokens; 1 = no pool")
    pooling: Literal["max", "avg"] = Field("max", description="kind of pool")
    order: Literal["pool-mean", "mean-pool"] = Field(
        "pool-mean",
        description="pool each query's row and then average (the papers), or average first (released code)",
    )
    keep_window: bool = Field(True, description="window tokens inside the range are kept without competing")

    def build(self) -> Policy:
        return self.policy(
            WindowAttentionScorer(self.window_size, self.kernel_size, self.pooling, self.order, self.keep_window)
        )


class PyramidKV(SnapKV):
    """``pyramidkv``."""

    name = "pyramidkv"
    summary = "SnapKV's scores, with more entries in shallow layers and fewer in deep ones"
    source = "PyramidKV (arXiv 2406.02069), Sec. 4.2"
    use_when = "the same, small budgets"

    budget_rule: BudgetRule = "pyramid"


class AdaSnapKV(SnapKV):
    """``ada-snapkv``."""

    name = "ada-snapkv"
    summary = "SnapKV's scores, with more entries for heads whose attention is spread out"
    source = "Ada-KV (arXiv 2407.11550), Alg. 1 and 2"
    use_when = "SnapKV's cost, better heads"

    budget_rule: BudgetRule = "adaptive"


class AdaPyramidKV(SnapKV):
    """``ada-pyramidkv``."""

    name = "ada-pyramidkv"
    summary = "PyramidKV's layer budgets, shared out to the heads of a layer as in Ada-KV"
    source = "Ada-KV (arXiv 2407.11550), Alg. 2"
    use_when = "as ada-snapkv, small budgets"

    budget_rule: BudgetRule = "adaptive-pyramid"
