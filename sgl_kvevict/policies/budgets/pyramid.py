"""A budget that falls linearly with depth."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from sgl_kvevict.policies.budgets.layered import LayerRule, LayerTotals
from sgl_kvevict.policies.parts import RangeScores
from sgl_kvevict.policies.rounding import round_shares


@dataclass(frozen=True)
class PyramidLayers(LayerRule):
    """Shallow layers keep more, deep layers less, the mean unchanged.

    With ``base`` the mean entries per head, the last layer gets ``base / beta`` and the first
    ``2 * base - base / beta``; a first layer that would exceed the range is cut to it and the last one
    raised.

    Attributes:
        beta: steepness, >= 1; 1 is uniform.

    Source: PyramidKV (arXiv 2406.02069), Sec. 4.2, and its released code.
    Differs: the code floors its step and so overspends (by 15 % at a budget of 128); here the schedule is
        exact and rounded by largest remainder, so it is neutral to the budget.
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
    """Entries per head of each layer, before rounding.

    Args:
        base: mean over the layers, at most ``limit``.
        limit: most that a layer can keep.
        num_layers: layers.
        beta: steepness.

    Returns:
        A falling arithmetic series with mean ``base``.
    """
    if num_layers == 1:
        return [base]
    low = base / beta
    high = 2 * base - low
    if high > limit:
        high, low = Fraction(limit), 2 * base - limit
    step = (high - low) / (num_layers - 1)
    return [high - layer * step for layer in range(num_layers)]
