"""Methods that score by the attention of the prompt's last queries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from sgl_kvevict.policies.options import option
from sgl_kvevict.policies.policy import Policy
from sgl_kvevict.policies.presets.budget import BudgetOptions, budget_rule
from sgl_kvevict.policies.presets.entry import PolicyEntry
from sgl_kvevict.policies.scorers import WindowAttentionScorer
from sgl_kvevict.policies.selectors import TopKSelector


@dataclass(frozen=True)
class WindowOptions(BudgetOptions):
    """Options of the SnapKV family."""

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


@dataclass(frozen=True)
class PyramidKVOptions(WindowOptions):
    """Options of ``pyramidkv``."""

    budget_rule: str = budget_rule("pyramid")


@dataclass(frozen=True)
class AdaSnapKVOptions(WindowOptions):
    """Options of ``ada-snapkv``."""

    budget_rule: str = budget_rule("adaptive")


@dataclass(frozen=True)
class AdaPyramidKVOptions(WindowOptions):
    """Options of ``ada-pyramidkv``."""

    budget_rule: str = budget_rule("adaptive-pyramid")


def _builder(name: str) -> Callable[[WindowOptions], Policy]:
    def build(options: WindowOptions) -> Policy:
        return Policy(name, options.scorer(), options.allocator(), TopKSelector())

    return build


SNAPKV = PolicyEntry(
    "snapkv",
    "tokens that the prompt's last queries attend to, the same number in every head",
    WindowOptions,
    _builder("snapkv"),
)
PYRAMIDKV = PolicyEntry(
    "pyramidkv",
    "SnapKV's scores, with more entries in shallow layers and fewer in deep ones",
    PyramidKVOptions,
    _builder("pyramidkv"),
)
ADA_SNAPKV = PolicyEntry(
    "ada-snapkv",
    "SnapKV's scores, with more entries for heads whose attention is spread out",
    AdaSnapKVOptions,
    _builder("ada-snapkv"),
)
ADA_PYRAMIDKV = PolicyEntry(
    "ada-pyramidkv",
    "PyramidKV's layer budgets, shared out to the heads of a layer as in Ada-KV",
    AdaPyramidKVOptions,
    _builder("ada-pyramidkv"),
)
