"""K-VEC's selection: a bonus for tokens that few earlier layers have kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sgl_kvevict.errors import InvariantError
from sgl_kvevict.policies.parts import RangeScores, Trait
from sgl_kvevict.policies.ranking import key_max, order_keys, top_mask
from sgl_kvevict.policies.rounding import exact_fraction


@dataclass(frozen=True)
class CoverageSelector:
    """Layer by layer: score + bonus * importance * (1 - coverage), each head's own best tokens safe.

    Coverage is the share of the layers so far in which any head kept the token. The counts live in this call
    only.

    Attributes:
        bonus: weight of the cross-layer term (``lambda``).
        protected_share: share of a head's budget that its own highest scores are sure of (``beta``).

    Source: K-VEC (arXiv 2606.29563), Eq. 12, 14-16; Alg. 1, lines 9-15.
    Differs: protected tokens come first whatever the scores (the printed override of 1.0 can be beaten by a
        bonus).
    """

    bonus: float = 1.0
    protected_share: float = 0.25
    requires: ClassVar[frozenset[Trait]] = frozenset({Trait.IMPORTANCE})

    def select(self, scores: RangeScores, keep_lens: Tensor) -> Tensor:
        """Choose tokens; see :class:`Selector`."""
        if scores.importance is None:
            raise InvariantError("the scorer promised an importance per token and gave none")
        values, importance = scores.candidates(scores.values), scores.candidates(scores.importance)
        share = exact_fraction(self.protected_share)
        budgets = keep_lens + scores.num_pinned + scores.num_behind
        num_safe = (budgets * share.numerator).div(share.denominator, rounding_mode="floor")
        safe = top_mask(scores.keys, torch.minimum(num_safe, keep_lens))
        times_kept = torch.zeros_like(importance[0])
        kept = []
        for layer in range(values.shape[0]):
            focus = importance[layer] * (1 - times_kept / (layer + 1))
            keys = order_keys(values[layer] + self.bonus * focus)
            kept.append(top_mask(keys.masked_fill(safe[layer], key_max(keys)), keep_lens[layer]))
            times_kept = times_kept + kept[-1].any(0)
        return scores.with_pinned(torch.stack(kept))
