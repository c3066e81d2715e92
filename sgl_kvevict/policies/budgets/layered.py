"""Budgets in two steps: a total for each layer, then a share of it for each head."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from sgl_kvevict.policies.parts import BudgetAllocator, RangeScores, Trait

LayerTotals = tuple[int, ...] | Tensor
"""Entries per scored layer: host numbers where the rule needs no scores, else [num_scored_layers] int64."""


class LayerRule(ABC):
    """How a total is split over layers. Frozen, pure."""

    @property
    def requires(self) -> frozenset[Trait]:
        """Traits the scores must have."""
        return frozenset()

    @property
    def equal(self) -> bool:
        """Every layer gets the same."""
        return False

    @abstractmethod
    def totals(self, scores: RangeScores, total: int) -> LayerTotals:
        """Entries per layer, at most ``num_kv_heads * num_candidates`` each; sums to ``total``."""


class HeadRule(ABC):
    """How a layer's total is split over its heads. Frozen, pure."""

    @property
    def requires(self) -> frozenset[Trait]:
        """Traits the scores must have."""
        return frozenset()

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
        """Traits the scores must have."""
        return self.layers.requires | self.heads.requires

    @property
    def equal_layers(self) -> bool:
        """Every layer gets the same total."""
        return self.layers.equal

    def allocate(self, scores: RangeScores, total: int) -> Tensor:
        """Split ``total`` entries; see :class:`BudgetAllocator`."""
        return self.heads.split(scores, self.layers.totals(scores, total))


def totals_tensor(totals: LayerTotals, device: torch.device) -> Tensor:
    """Layer totals as [num_scored_layers] int64 on the device."""
    if isinstance(totals, Tensor):
        return totals
    return torch.tensor(totals, dtype=torch.int64).to(device, non_blocking=True)


def common_total(totals: LayerTotals) -> int | None:
    """The one number all layers share, if it is known on the host."""
    return totals[0] if isinstance(totals, tuple) and len(set(totals)) == 1 else None
