"""Options that choose the budget rule of any scored policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sgl_kvevict.policies.budgets import (
    AdaptiveHeads,
    AllLayersBudget,
    LayeredBudget,
    UniformHeads,
    UniformLayers,
)
from sgl_kvevict.policies.budgets.layered import HeadRule, LayerRule
from sgl_kvevict.policies.options import option
from sgl_kvevict.policies.parts import BudgetAllocator

RULES = ("uniform", "adaptive", "all-heads", "all-layers")
_ADAPTIVE = ("adaptive",)


def budget_rule(default: str) -> str:
    """Declare the ``budget_rule`` option with a method's own rule as default."""
    rule: str = option(
        default,
        "how the budget is split: the same everywhere, adaptive over the heads of a layer (Ada-KV), one "
        "competition over a layer's heads, or one over all layers and heads",
        choices=RULES,
    )
    return rule


@dataclass(frozen=True)
class BudgetOptions:
    """How a method's budget is split over layers and heads."""

    budget_rule: str = budget_rule("uniform")
    safeguard: Literal["authors_code", "paper", "kvpress"] = option(
        "authors_code",
        "adaptive heads: the uniform share weighs alpha (authors_code) or 1 - alpha (paper), or each "
        "head's best alpha share is kept first (kvpress)",
        choices=("authors_code", "paper", "kvpress"),
        only_with=("budget_rule", _ADAPTIVE),
    )
    alpha: float = option(
        0.2,
        "adaptive heads: strength of the safeguard",
        minimum=0,
        maximum=1,
        only_with=("budget_rule", _ADAPTIVE),
    )
    floor_share: float = option(
        0.1,
        "all layers: share of its uniform budget that every head keeps of its own best tokens",
        minimum=0,
        maximum=1,
        only_with=("budget_rule", ("all-layers",)),
    )

    def allocator(self) -> BudgetAllocator:
        """Compose the chosen rule."""
        if self.budget_rule == "all-layers":
            return AllLayersBudget(self.floor_share)
        return LayeredBudget(self._layer_rule(), self._head_rule())

    def _layer_rule(self) -> LayerRule:
        return UniformLayers()

    def _head_rule(self) -> HeadRule:
        if self.budget_rule in _ADAPTIVE:
            return AdaptiveHeads(self.safeguard, self.alpha)
        return AdaptiveHeads("none") if self.budget_rule == "all-heads" else UniformHeads()
