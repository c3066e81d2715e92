"""Head rules: the same share for every head, or shares that follow the scores (Ada-KV)."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import torch
from torch import Tensor

from sgl_kvevict.policies.budgets.layered import HeadRule, LayerTotals, common_total, totals_tensor
from sgl_kvevict.policies.parts import RangeScores, Trait
from sgl_kvevict.policies.ranking import key_max, top_counts, top_mask
from sgl_kvevict.policies.rounding import exact_fraction, largest_remainder

Safeguard = Literal["authors_code", "paper", "kvpress", "none"]


@dataclass(frozen=True)
class UniformHeads(HeadRule):
    """The same for every head of a layer; an indivisible remainder goes to the first heads."""

    def split(self, scores: RangeScores, totals: LayerTotals) -> Tensor:
        """Entries per head; see :class:`HeadRule`."""
        num_heads = scores.values.shape[1]
        per_layer = totals_tensor(totals, scores.values.device).unsqueeze(-1)
        share = per_layer.div(num_heads, rounding_mode="floor")
        extra = torch.arange(num_heads, device=per_layer.device) < per_layer - share * num_heads
        return share + extra


@dataclass(frozen=True)
class AdaptiveHeads(HeadRule):
    """A head's budget is its number of hits in the layer's global top set, mixed with the uniform share.

    Attributes:
        safeguard: "authors_code" gives the adaptive part the weight ``1 - alpha`` (80 %), "paper" the weight
            ``alpha`` (20 %) as printed, "kvpress" first grants each head its own best ``alpha`` share and
            lets the rest compete, "none" is the pure adaptive split.
        alpha: strength of the safeguard, in [0, 1].

    Source: Ada-KV (arXiv 2407.11550), Alg. 1 and Alg. 2, lines 6-8.
    Differs: the paper's text and its released code disagree on what alpha weighs; the default follows the
        code, which most likely produced its tables. Rounding is by largest remainder, so that sums are exact.
    """

    safeguard: Safeguard = "authors_code"
    alpha: float = 0.2
    requires = frozenset({Trait.COMPARABLE})

    def split(self, scores: RangeScores, totals: LayerTotals) -> Tensor:
        """Entries per head; see :class:`HeadRule`."""
        common = common_total(totals)
        tensor = totals_tensor(totals, scores.values.device)
        keys = scores.keys
        if self.safeguard == "kvpress":
            floors = self._own_floor(tensor, keys.shape[1], scores.num_pinned)
            keys = keys.masked_fill(top_mask(keys, floors), key_max(keys))
        hits = top_counts(keys, tensor if common is None else common)
        if self.safeguard in ("kvpress", "none"):
            return hits
        alpha = exact_fraction(self.alpha)
        return mix_with_uniform(hits, tensor, alpha if self.safeguard == "paper" else 1 - alpha)

    def _own_floor(self, totals: Tensor, num_heads: int, num_pinned: int) -> Tensor:
        """[num_scored_layers, num_kv_heads]: own best tokens, pinned ones counted as in kvpress."""
        alpha = exact_fraction(self.alpha)
        per_head = totals.div(num_heads, rounding_mode="floor") + num_pinned
        floor = (per_head * alpha.numerator).div(alpha.denominator, rounding_mode="floor") - num_pinned
        return floor.clamp(min=0).unsqueeze(-1).expand(-1, num_heads)


def mix_with_uniform(hits: Tensor, totals: Tensor, weight: Fraction) -> Tensor:
    """``weight * hits + (1 - weight) * total / num_heads``, rounded by largest remainder.

    Args:
        hits: [num_layers, num_heads], int64; rows sum to ``totals``.
        totals: [num_layers], int64.
        weight: of the adaptive part.

    Returns:
        [num_layers, num_heads], int64; rows sum to ``totals``.

    Source: Ada-KV (arXiv 2407.11550), Alg. 2, line 8.
    """
    num_heads = hits.shape[-1]
    numerators = hits * (weight.numerator * num_heads) + totals.unsqueeze(-1) * (weight.denominator - weight.numerator)
    return largest_remainder(numerators, weight.denominator * num_heads, totals)
