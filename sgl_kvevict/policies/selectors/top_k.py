"""The highest scores of each head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from sgl_kvevict.policies.parts import RangeScores, Trait
from sgl_kvevict.policies.ranking import top_mask


@dataclass(frozen=True)
class TopKSelector:
    """Each head keeps its best tokens; ties go to the higher tie-break score, then to the lower position.

    Source: the common rule of SnapKV, H2O, Ada-KV (arXiv 2407.11550, Theorem 3.2: optimal for given budgets).
    """

    requires: ClassVar[frozenset[Trait]] = frozenset()

    def select(self, scores: RangeScores, keep_lens: Tensor) -> Tensor:
        """Choose tokens; see :class:`Selector`."""
        return scores.with_pinned(top_mask(scores.keys, keep_lens))
