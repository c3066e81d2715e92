"""Options that every method has: how its budget is split over layers and heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sgl_kvevict.policies.budgets import (
    AdaptiveHeads,
    AllLayersBudget,
    DensityLayers,
    LayeredBudget,
    PyramidLayers,
    UniformHeads,
    UniformLayers,
)
from sgl_kvevict.policies.budgets.layered import HeadRule, LayerRule
from sgl_kvevict.policies.options import option
from sgl_kvevict.policies.parts import BudgetAllocator

RULES = (
    "uniform",
    "pyramid",
    "density",
    "adaptive",
    "adaptive-pyramid",
    "adaptive-density",
    "all-heads",
    "all-layers",
)
_ADAPTIVE = ("adaptive", "adaptive-pyramid", "adaptive-density")
_PYRAMID = ("pyramid", "adaptive-pyramid")
_DENSITY = ("density", "adaptive-density")


def budget_rule(default: str) -> str:
    """Declare the ``budget_rule`` option with a method's own rule as default."""
    rule: str = option(
        default,
        "how the budget is split. Layers: the same for all (uniform, adaptive, all-heads), falling with "
        "depth (pyramid), by attention density (density). Heads of a layer: the same, or by their scores with "
        "a safeguard (adaptive) or without (all-heads). all-layers: one competition over all layers and heads",
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
    pyramid_beta: int = option(20, "pyramid: steepness; 1 is uniform", minimum=1, only_with=("budget_rule", _PYRAMID))
    variance_norm: Literal["minmax", "none", "code"] = option(
        "minmax",
        "density: scale the variances over the layers (minmax), not at all (the printed formula), or over "
        "each layer's heads (code)",
        choices=("minmax", "none", "code"),
        only_with=("budget_rule", _DENSITY),
    )
    density_rule: Literal["softmax", "reciprocal"] = option(
        "softmax",
        "density: shares from the softmax of the negative variance, or from its reciprocal",
        choices=("softmax", "reciprocal"),
        only_with=("budget_rule", _DENSITY),
    )
    floor_share: float = option(
        0.1,
        "all-layers: share of its uniform budget that every head keeps of its own best tokens",
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
        if self.budget_rule in _PYRAMID:
            return PyramidLayers(self.pyramid_beta)
        if self.budget_rule in _DENSITY:
            return DensityLayers(self.variance_norm, self.density_rule)
        return UniformLayers()

    def _head_rule(self) -> HeadRule:
        if self.budget_rule in _ADAPTIVE:
            return AdaptiveHeads(self.safeguard, self.alpha)
        return AdaptiveHeads("none") if self.budget_rule == "all-heads" else UniformHeads()


@dataclass(frozen=True)
class OneBudgetOptions(BudgetOptions):
    """Those of methods whose entries of all layers and heads compete for one budget, unless told otherwise."""

    budget_rule: str = budget_rule("all-layers")
