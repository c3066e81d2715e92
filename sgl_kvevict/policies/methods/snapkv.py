"""``snapkv``: tokens that the prompt's last queries attend to, the same number in every head.

Source: SnapKV (arXiv 2404.14469), Sec. 4; with grouped queries, pooling and the sizes of ``@paper`` as in Ada-KV (arXiv
2407.11550), Alg. 2. The score, :class:`WindowAttentionScorer`, is also that of ``pyramidkv``, ``ada-snapkv``,
``ada-pyramidkv`` and ``chunkkv``; the first three take these options with other budget rules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sgl_kvevict.policies.budget_options import BudgetOptions
from sgl_kvevict.policies.method import Method, PaperSettings, PaperValue
from sgl_kvevict.policies.options import option
from sgl_kvevict.policies.policy import Policy
from sgl_kvevict.policies.scorers import WindowAttentionScorer
from sgl_kvevict.policies.selectors import TopKSelector

ADA_KV = "Ada-KV (arXiv 2407.11550)"
PAPER_OPTIONS = (
    PaperValue("window_size", 32, "experiments, settings"),
    PaperValue("kernel_size", 7, "experiments, settings"),
    PaperValue("pooling", "max", "experiments, settings"),
    PaperValue("order", "pool-mean", "Alg. 2, lines 3-4"),
    PaperValue("keep_window", True, "Alg. 2, line 11"),
)
"""Of Ada-KV, which ran all of these methods."""


def as_run_in_ada_kv(paper: str, *more: PaperValue) -> PaperSettings:
    """What ``NAME@paper`` sets of a method that takes :class:`SnapKVOptions`; ``more`` beside these options."""
    why_tail = "Alg. 2, lines 6 and 11: the window is stored besides"
    return PaperSettings(paper, (*PAPER_OPTIONS, *more), "window_size", why_tail)


@dataclass(frozen=True)
class SnapKVOptions(BudgetOptions):
    """Options of ``snapkv`` and, with other budget rules, of its relatives."""

    window_size: int = option(32, "queries at the end of the prompt whose attention scores tokens", minimum=1)
    kernel_size: int = option(7, "width of the pool along the tokens; 1 = no pool", minimum=1, maximum=127, odd=True)
    pooling: Literal["max", "avg"] = option("max", "kind of pool", choices=("max", "avg"))
    order: Literal["pool-mean", "mean-pool"] = option(
        "pool-mean",
        "pool each query's row and then average (the papers), or average first (released code)",
        choices=("pool-mean", "mean-pool"),
    )
    keep_window: bool = option(True, "window tokens inside the range are kept without competing")

    def scorer(self) -> WindowAttentionScorer:
        """The scorer these options describe."""
        return WindowAttentionScorer(self.window_size, self.kernel_size, self.pooling, self.order, self.keep_window)


def _build(options: SnapKVOptions) -> Policy:
    return Policy("snapkv", options.scorer(), options.allocator(), TopKSelector())


METHOD = Method(
    name="snapkv",
    summary="tokens that the prompt's last queries attend to, the same number in every head",
    source="SnapKV (arXiv 2404.14469); Ada-KV (arXiv 2407.11550), Alg. 2",
    use_when="the question ends the prompt",
    options_type=SnapKVOptions,
    build=_build,
    paper=as_run_in_ada_kv(f"SnapKV as run in {ADA_KV}"),
)
