"""Selectors shared by several methods; others are in their method's file."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sgl_kvevict.policies.budgets import exact_fraction
from sgl_kvevict.policies.parts import RangeScores, Selector
from sgl_kvevict.policies.ranking import key_max, top_mask


@dataclass(frozen=True)
class TopKSelector(Selector):
    """Each head keeps its best tokens; ties go to the higher tie-break score, then to the lower position.

    Source: common to SnapKV, H2O and Ada-KV (arXiv 2407.11550, Theorem 3.2: optimal for given budgets).
    """

    def select(self, scores: RangeScores, keep_lens: Tensor) -> Tensor:
        return scores.with_pinned(top_mask(scores.keys, keep_lens))


@dataclass(frozen=True)
class HeavyHitterSelector(Selector):
    """Each head keeps its most recent tokens, and before them those with the highest scores.

    ``recent_ratio`` of the budget, rounded down, is for recent tokens: 0.5 is H2O's 1:1, 0.25 is D2O's N:M = 3:1.

    Source: H2O (arXiv 2306.14048), Sec. 4; D2O, Eq. 7, 8.
    Differs: "recent" ends before the tokens that every head keeps (``tail_tokens``).
    """

    recent_ratio: float = 0.5

    def select(self, scores: RangeScores, keep_lens: Tensor) -> Tensor:
        """Choose tokens; see :class:`Selector`."""
        ratio = exact_fraction(self.recent_ratio)
        num_recent = (keep_lens * ratio.numerator).div(ratio.denominator, rounding_mode="floor")
        index = torch.arange(scores.num_candidates, device=keep_lens.device)
        recent = index >= scores.num_candidates - num_recent.unsqueeze(-1)
        # Recent tokens get the largest key: one selection then fills the rest of the budget by score.
        return scores.with_pinned(top_mask(scores.keys.masked_fill(recent, key_max(scores.keys)), keep_lens))
