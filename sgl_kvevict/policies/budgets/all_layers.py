"""One budget for which the entries of all layers and heads compete."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sgl_kvevict.policies.parts import BudgetAllocator, RangeScores, Trait
from sgl_kvevict.policies.ranking import key_max, top_counts, top_mask
from sgl_kvevict.policies.rounding import exact_fraction


@dataclass(frozen=True)
class AllLayersBudget(BudgetAllocator):
    """A global top set over all layers and heads, after each head was granted its own best entries.

    Packing makes unequal layers free, so a prefix's budget can go wherever the scores are. Ties go to the
    lower layer, then head, then position.

    Attributes:
        floor_share: share of its uniform budget that each head gets for its own best tokens.

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
        keys = keys.masked_fill(top_mask(keys, own), key_max(keys))
        return top_counts(keys.flatten(0, 1).unsqueeze(0), total).view(num_layers, num_heads)
