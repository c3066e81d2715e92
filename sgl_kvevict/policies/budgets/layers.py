"""Layer rules that need no attention statistics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sgl_kvevict.policies.budgets.layered import LayerTotals
from sgl_kvevict.policies.parts import RangeScores, Trait
from sgl_kvevict.policies.rounding import even_split


@dataclass(frozen=True)
class UniformLayers:
    """The same total for every layer; an indivisible remainder goes to the first ones."""

    requires: ClassVar[frozenset[Trait]] = frozenset()
    equal: ClassVar[bool] = True

    def totals(self, scores: RangeScores, total: int) -> LayerTotals:
        """Entries per layer; see :class:`LayerRule`."""
        return tuple(even_split(total, scores.values.shape[0]))
