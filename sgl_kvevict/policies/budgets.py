"""Budget rules: how many entries each (layer, head) keeps; shares are rounded so that they add up exactly."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import ClassVar, Literal

import torch
from torch import Tensor

from sgl_kvevict.policies.parts import BudgetAllocator, RangeScores, Trait
from sgl_kvevict.policies.ranking import fill_in_order, key_max, top_counts, top_mask

Safeguard = Literal["authors_code", "paper", "kvpress"]
VarianceNorm = Literal["minmax", "none"]

LayerTotals = tuple[int, ...] | Tensor
"""Entries per scored layer: host integers if the rule reads no scores, else [num_scored_layers] int64."""


class LayerRule(ABC):
    """How a total is split over layers. Frozen, pure."""

    requires: ClassVar[frozenset[Trait]] = frozenset()
    """Traits the scores must have."""
    equal: ClassVar[bool] = False
    """Whether every layer gets the same total."""

    @abstractmethod
    def totals(self, scores: RangeScores, total: int) -> LayerTotals:
        """Entries per layer, at most ``num_kv_heads * num_candidates`` each; sums to ``total``."""


class HeadRule(ABC):
    """How a layer's total is split over its heads. Frozen, pure."""

    requires: ClassVar[frozenset[Trait]] = frozenset()

    @abstractmethod
    def split(self, scores: RangeScores, totals: LayerTotals) -> Tensor:
        """[num_scored_layers, num_kv_heads] int64, at most ``num_candidates``; rows sum to ``totals``."""


@dataclass(frozen=True)
class LayeredBudget(BudgetAllocator):
    """A layer rule, then a head rule; heads of different layers never compete."""

    layers: LayerRule
    heads: HeadRule

    @property
    def requires(self) -> frozenset[Trait]:
        return self.layers.requires | self.heads.requires

    @property
    def equal_layers(self) -> bool:
        return self.layers.equal

    def allocate(self, scores: RangeScores, total: int) -> Tensor:
        return self.heads.split(scores, self.layers.totals(scores, total))


@dataclass(frozen=True)
class UniformLayers(LayerRule):
    """The same total for every layer; an indivisible remainder goes to the first ones."""

    equal = True

    def totals(self, scores: RangeScores, total: int) -> LayerTotals:
        """Entries per layer; see :class:`LayerRule`."""
        num_layers = scores.values.shape[0]
        return tuple(total // num_layers + (layer < total % num_layers) for layer in range(num_layers))


@dataclass(frozen=True)
class PyramidLayers(LayerRule):
    """Shallow layers keep more, deep layers less; ``beta`` >= 1 is the steepness, 1 is uniform.

    Source: PyramidKV (arXiv 2406.02069), Sec. 4.2, and its released code.
    Differs: the code floors its step and overspends by 15 % at a budget of 128; here sums are exact.
    """

    beta: int = 20

    def totals(self, scores: RangeScores, total: int) -> LayerTotals:
        """Entries per layer; see :class:`LayerRule`."""
        num_layers, num_heads, _ = scores.values.shape
        per_head = pyramid_schedule(
            Fraction(total, num_layers * num_heads), scores.num_candidates, num_layers, self.beta
        )
        return tuple(round_shares([num_heads * share for share in per_head], total))


def pyramid_schedule(base: Fraction, limit: int, num_layers: int, beta: int) -> list[Fraction]:
    """Entries per head of each layer, before rounding: a falling arithmetic series with mean ``base`` <= ``limit``.

    The last layer gets ``base / beta``, the first ``2 * base - base / beta``. If the first is above ``limit`` (entries
    that a head can keep), it gets ``limit`` and the last one more.
    """
    if num_layers == 1:
        return [base]
    low = base / beta
    high = 2 * base - low
    if high > limit:
        high, low = Fraction(limit), 2 * base - limit
    step = (high - low) / (num_layers - 1)
    return [high - layer * step for layer in range(num_layers)]


@dataclass(frozen=True)
class DensityLayers(LayerRule):
    """Layers whose accumulated attention varies little over the tokens (dense ones) keep more.

    The variance is averaged over the heads. Shares are clamped, and the difference is distributed in proportion.

    Attributes:
        variance_norm: "minmax" scales the variances of all layers to [0, 1]; "none" is the printed formula, which gives
            nearly everything to one layer on real prompts.
        floor_share: smallest share of the range that a layer keeps (at least 4 entries per head).

    Source: D2O (arXiv 2406.13035), Eq. 4, 5.
    Differs: the default normalises; no layer is exempt (the released code leaves three uncompressed).
    """

    variance_norm: VarianceNorm = "minmax"
    floor_share: float = 0.01
    requires = frozenset({Trait.ATTENTION_SUMS})

    def totals(self, scores: RangeScores, total: int) -> LayerTotals:
        """Entries per layer; see :class:`LayerRule`."""
        num_layers, num_heads, num_tokens = scores.values.shape
        per_head, rest = divmod(total, num_heads)
        floor = max(4, math.ceil(self.floor_share * num_tokens) - scores.num_pinned)
        # A small total cannot give every layer its floor.
        floor = min(floor, per_head // num_layers)
        weights = density_weights(attention_variance(scores.values, self.variance_norm))
        shares = water_fill(weights, floor, scores.num_candidates, per_head)
        target = torch.full((1,), per_head, dtype=torch.int64, device=shares.device)
        totals = largest_remainder(shares[None], 1, target)[0] * num_heads
        return totals + fill_in_order(num_heads * scores.num_candidates - totals, rest)


def attention_variance(sums: Tensor, norm: VarianceNorm) -> Tensor:
    """[num_layers], float64: variance of ``sums``, [num_layers, num_kv_heads, num_tokens]; D2O, Eq. 4."""
    variance = sums.double().var(-1, correction=0).mean(-1)
    if norm == "none":
        return variance
    low, high = variance.amin(), variance.amax()
    return (variance - low) / (high - low).clamp(min=1e-300)


def density_weights(variance: Tensor) -> Tensor:
    """Shares of the layers, summing to 1; D2O, Eq. 5."""
    return (-variance).softmax(-1)


def water_fill(weights: Tensor, low: float, high: float, total: float) -> Tensor:
    """``clamp(c * weights, low, high)``, with ``c`` such that the result sums to ``total``.

    ``weights`` is [n], float64, >= 0; ``n * low <= total <= n * high``.
    """
    # A weight of 0 would leave its lower bound at no finite factor.
    weights = weights.clamp(min=1e-200)
    turns = torch.cat((low / weights, high / weights)).sort().values  # values of c at which a share is clamped
    sums = (turns[:, None] * weights).clamp(low, high).sum(-1)
    # The sum rises with the factor and is linear between two of its turns, so the factor follows from the turns around
    # the total: no iteration, and no host sync.
    after = torch.searchsorted(sums, torch.full_like(sums[:1], total)).clamp(1, len(turns) - 1)
    left, right = turns[after - 1], turns[after]
    rise = (sums[after] - sums[after - 1]).clamp(min=1e-300)
    factor = left + (right - left) * ((total - sums[after - 1]) / rise).clamp(0, 1)
    return (factor * weights).clamp(low, high)


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
    """A head's budget is the number of its tokens among the layer's top scores, mixed with the uniform share.

    Attributes:
        safeguard: weight of the adaptive part: ``1 - alpha`` ("authors_code"), ``alpha`` as printed ("paper"), or 1
            ("none"); "kvpress" first grants each head its own best ``alpha`` share, and the rest compete.
        alpha: strength of the safeguard, in [0, 1].

    Source: Ada-KV (arXiv 2407.11550), Alg. 1 and Alg. 2, lines 6-8.
    Differs: text and released code disagree on alpha; the default follows the code, which most likely produced the
        tables. Rounding is by largest remainder, so that sums are exact.
    """

    safeguard: Safeguard | Literal["none"] = "authors_code"
    alpha: float = 0.2
    requires = frozenset({Trait.COMPARABLE})

    def split(self, scores: RangeScores, totals: LayerTotals) -> Tensor:
        """Entries per head; see :class:`HeadRule`."""
        tensor, keys = totals_tensor(totals, scores.values.device), scores.keys
        # A number, where all layers have the same.
        counts = totals[0] if isinstance(totals, tuple) and len(set(totals)) == 1 else tensor
        if self.safeguard == "kvpress":
            floors = self._own_floor(tensor, keys.shape[1], scores.num_pinned)
            # As a largest key, a granted entry is counted by the same competition, and sums stay exact.
            keys = keys.masked_fill(top_mask(keys, floors), key_max(keys))
        hits = top_counts(keys, counts)
        if self.safeguard in ("kvpress", "none"):
            return hits
        alpha = exact_fraction(self.alpha)
        return mix_with_uniform(hits, tensor, alpha if self.safeguard == "paper" else 1 - alpha)

    def _own_floor(self, totals: Tensor, num_heads: int, num_pinned: int) -> Tensor:
        """[num_scored_layers, num_kv_heads]: guaranteed tokens of each head; counts pinned ones, as kvpress does."""
        alpha = exact_fraction(self.alpha)
        per_head = totals.div(num_heads, rounding_mode="floor") + num_pinned
        floor = (per_head * alpha.numerator).div(alpha.denominator, rounding_mode="floor") - num_pinned
        return floor.clamp(min=0).unsqueeze(-1).expand(-1, num_heads)


def mix_with_uniform(hits: Tensor, totals: Tensor, weight: Fraction) -> Tensor:
    """``weight * hits + (1 - weight) * total / num_heads``, rounded by largest remainder (Ada-KV, Alg. 2, line 8).

    ``hits`` and the result are [num_layers, num_heads], int64; rows sum to ``totals``, [num_layers], int64.
    """
    num_heads = hits.shape[-1]
    numerators = hits * (weight.numerator * num_heads) + totals.unsqueeze(-1) * (weight.denominator - weight.numerator)
    return largest_remainder(numerators, weight.denominator * num_heads, totals)


@dataclass(frozen=True)
class AllLayersBudget(BudgetAllocator):
    """One competition over all layers and heads; ties go to the lower layer, then head, then position.

    First each head is granted its own best tokens, ``floor_share`` of its uniform budget.

    Source: Ada-KV's Alg. 1 (arXiv 2407.11550) with all layers as one, as in KVzip (arXiv 2505.23416), Sec. 3.
    Differs: Ada-KV never lets layers compete.
    """

    floor_share: float = 0.1
    requires = frozenset({Trait.COMPARABLE})

    def allocate(self, scores: RangeScores, total: int) -> Tensor:
        """Split ``total`` entries; see :class:`BudgetAllocator`."""
        keys = scores.keys
        num_layers, num_heads, _ = keys.shape
        own = int(exact_fraction(self.floor_share) * total / (num_layers * num_heads))
        # A granted entry gets the largest key, so one competition counts both and the sum stays exact.
        keys = keys.masked_fill(top_mask(keys, own), key_max(keys))
        return top_counts(keys.flatten(0, 1).unsqueeze(0), total).view(num_layers, num_heads)


def totals_tensor(totals: LayerTotals, device: torch.device) -> Tensor:
    """Layer totals as [num_scored_layers] int64 on the device."""
    if isinstance(totals, Tensor):
        return totals
    return torch.tensor(totals, dtype=torch.int64).to(device, non_blocking=True)


@lru_cache(256)
def exact_fraction(value: float) -> Fraction:
    """The decimal that a user typed: 0.2 is 1/5, not the nearest double."""
    return Fraction(str(value)).limit_denominator(1_000_000)


def round_shares(shares: Sequence[Fraction], total: int) -> list[int]:
    """Round non-negative shares that sum to ``total`` by largest remainder; ties to the lower index."""
    floors = [int(share) for share in shares]
    order = sorted(range(len(shares)), key=lambda i: (floors[i] - shares[i], i))
    for i in order[: total - sum(floors)]:
        floors[i] += 1
    return floors


def largest_remainder(numerators: Tensor, denominator: int, totals: Tensor) -> Tensor:
    """Round the fractions ``numerators / denominator``, [rows, parts], to int64; ties to the lower index.

    ``totals``, [rows] int64, are the sums of the rows' fractions: exact ones of int64, of float64 with rounding errors.
    """
    floors = numerators.div(denominator, rounding_mode="floor")
    remainders, floors = numerators - floors * denominator, floors.long()
    # Stable: of equal remainders the lower index gets the rest, on every device.
    order = remainders.sort(dim=-1, descending=True, stable=True).indices
    missing = (totals - floors.sum(-1)).unsqueeze(-1)
    bonus = (torch.arange(floors.shape[-1], device=floors.device) < missing).to(floors.dtype)
    return floors.scatter_add(-1, order, bonus.expand_as(floors).contiguous())
