"""Layer rules that need no attention statistics."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_kvevict.policies.budgets.layered import LayerRule, LayerTotals
from sgl_kvevict.policies.parts import RangeScores
from sgl_kvevict.policies.rounding import even_split


@dataclass(frozen=True)
class UniformLayers(LayerRule):
    """The same total for every layer; an indivisible remainder goes to the first ones."""

    equal = True

    def totals(self, scores: RangeScores, total: int) -> LayerTotals:
        """Entries per layer; see :class:`LayerRule`."""
        return tuple(even_split(total, scores.values.shape[0]))
