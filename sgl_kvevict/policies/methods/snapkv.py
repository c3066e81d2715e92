"""``snapkv``: tokens that the prompt's last queries attend to, the same number in every head.

Grouped queries, pooling and the sizes of ``@paper`` follow Ada-KV (arXiv 2407.11550), Alg. 2. ``pyramidkv``,
``ada-snapkv`` and ``ada-pyramidkv`` are this policy with other budget rules.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from sgl_kvevict.policies.options import BudgetOptions, OddInt, PaperSettings, PaperValue
from sgl_kvevict.policies.policy import Policy
from sgl_kvevict.policies.scorers import WindowAttentionScorer

ADA_KV = "Ada-KV (arXiv 2407.11550)"
WindowSize = Annotated[int, Field(ge=1, description="queries at the end of the prompt whose attention scores tokens")]


def as_run_in_ada_kv(paper: str, *more: PaperValue) -> PaperSettings:
    """Settings of Ada-KV's runs of ``snapkv`` and its variants, and ``more``."""
    options = (
        PaperValue("window_size", 32, "experiments, settings"),
        PaperValue("kernel_size", 7, "experiments, settings"),
        PaperValue("pooling", "max", "experiments, settings"),
        PaperValue("order", "pool-mean", "Alg. 2, lines 3-4"),
        PaperValue("keep_window", True, "Alg. 2, line 11"),
        *more,
    )
    return PaperSettings(paper, options, "window_size", "Alg. 2, lines 6 and 11: the window is stored besides")


class SnapKV(BudgetOptions):
    """``snapkv``."""

    name = "snapkv"
    summary = "tokens that the prompt's last queries attend to, the same number in every head"
    source = "SnapKV (arXiv 2404.14469); Ada-KV (arXiv 2407.11550), Alg. 2"
    use_when = "the question ends the prompt"
    paper = as_run_in_ada_kv(f"SnapKV as run in {ADA_KV}")

    window_size: WindowSize = 32
    kernel_size: OddInt = Field(7, ge=1, le=127, description="width of the pool along the tokens; 1 = no pool")
    pooling: Literal["max", "avg"] = Field("max", description="kind of pool")
    order: Literal["pool-mean", "mean-pool"] = Field(
        "pool-mean",
        description="pool each query's row and then average (the papers), or average first (released code)",
    )
    keep_window: bool = Field(True, description="window tokens inside the range are kept without competing")

    def build(self) -> Policy:
        """Make the policy."""
        return self.policy(
            WindowAttentionScorer(self.window_size, self.kernel_size, self.pooling, self.order, self.keep_window)
        )
