"""Layer budgets that follow how dense each layer's attention is (D2O)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sgl_kvevict.policies.budgets.layered import LayerRule, LayerTotals
from sgl_kvevict.policies.parts import RangeScores, Trait
from sgl_kvevict.policies.ranking import fill_in_order
from sgl_kvevict.policies.rounding import largest_remainder_float

VarianceNorm = Literal["minmax", "none", "code"]
DensityRule = Literal["softmax", "reciprocal"]


@dataclass(frozen=True)
class DensityLayers(LayerRule):
    """Layers whose accumulated attention varies little (dense ones) keep more.

    A layer's variance is over the range's tokens, per head, averaged over the heads. Shares are capped at the
    range, floored, and the difference is shared out in proportion, so that the budget is spent exactly.

    Attributes:
        variance_norm: "minmax" scales the variances of all layers to [0, 1]; "none" is the paper's formula as
            printed, which hands nearly everything to one layer on real prompts (variances grow with the
            length); "code" scales over the heads of each layer and averages, as the authors' release.
        rule: "softmax" of the negative variance, or "reciprocal" of it (the paper's Table 4).
        floor_share: smallest share of the range that a layer keeps (at least 4 entries per head).

    Source: D2O (arXiv 2406.13035), Eq. 4, 5; Table 4 for the alternative.
    Differs: the default normalises, because the printed formula is not usable on long prompts; the released
        code's rule that the first two and the last layer are never compressed is left out, because budgets
        here are exact.
    """

    variance_norm: VarianceNorm = "minmax"
    rule: DensityRule = "softmax"
    floor_share: float = 0.01
    requires = frozenset({Trait.ATTENTION_SUMS})

    def totals(self, scores: RangeScores, total: int) -> LayerTotals:
        """Entries per layer; see :class:`LayerRule`."""
        num_layers, num_heads, num_tokens = scores.values.shape
        per_head, rest = divmod(total, num_heads)
        floor = max(4, math.ceil(self.floor_share * num_tokens) - scores.num_pinned)
        floor = min(floor, per_head // num_layers)
        weights = density_weights(attention_variance(scores.values, self.variance_norm), self.rule)
        shares = water_fill(weights, floor, scores.num_candidates, per_head)
        target = torch.full((1,), per_head, dtype=torch.int64, device=shares.device)
        totals = largest_remainder_float(shares[None], target)[0] * num_heads
        return totals + fill_in_order(num_heads * scores.num_candidates - totals, rest)


def attention_variance(sums: Tensor, norm: VarianceNorm) -> Tensor:
    """The variance metric F of each layer.

    Args:
        sums: [num_layers, num_kv_heads, num_tokens], column sums of attention.
        norm: see :class:`DensityLayers`.

    Returns:
        [num_layers], float64.

    Source: D2O, Eq. 4 (population variance).
    """
    per_head = sums.double().var(-1, correction=1 if norm == "code" else 0)
    if norm == "code":
        return _minmax(per_head).mean(-1)
    variance = per_head.mean(-1)
    return _minmax(variance) if norm == "minmax" else variance


def density_weights(variance: Tensor, rule: DensityRule) -> Tensor:
    """Shares of the layers, summing to 1.

    Source: D2O, Eq. 5 ("softmax", shifted so that it cannot overflow) and Table 4 ("reciprocal").
    """
    if rule == "softmax":
        return (-variance).softmax(-1)
    inverse = 1 / variance.clamp(min=1e-12)
    return inverse / inverse.sum()


def water_fill(weights: Tensor, low: float, high: float, total: float) -> Tensor:
    """Shares in proportion to the weights, each within ``[low, high]``, with a given sum.

    What caps cut off (or floors add) is shared out over the others in proportion to their weights.

    Args:
        weights: [n], float64, >= 0.
        low: smallest share; ``n * low <= total``.
        high: largest share; ``n * high >= total``.
        total: sum of the shares.

    Returns:
        [n], float64: ``clamp(c * weights, low, high)`` for the one factor ``c`` that gives the sum.
    """
    weights = weights.clamp(min=1e-200)
    turns = torch.cat((low / weights, high / weights)).sort().values  # where a share starts or stops growing
    sums = (turns[:, None] * weights).clamp(low, high).sum(-1)
    after = torch.searchsorted(sums, torch.full_like(sums[:1], total)).clamp(1, len(turns) - 1)
    left, right = turns[after - 1], turns[after]
    rise = (sums[after] - sums[after - 1]).clamp(min=1e-300)
    factor = left + (right - left) * ((total - sums[after - 1]) / rise).clamp(0, 1)
    return (factor * weights).clamp(low, high)


def _minmax(x: Tensor) -> Tensor:
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    return (x - low) / (high - low).clamp(min=1e-300)
