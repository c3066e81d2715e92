"""Integer shares that add up exactly."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor


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
    """Round the fractions ``numerators / denominator``, [rows, parts] int64, to integers; ties to the lower index.

    ``totals``, [rows] int64, are the exact sums of the rows' fractions.
    """
    floors = numerators.div(denominator, rounding_mode="floor")
    return _add_missing(floors, numerators - floors * denominator, totals)


def largest_remainder_float(shares: Tensor, totals: Tensor) -> Tensor:
    """:func:`largest_remainder` of float64 shares [rows, parts], whose sums may have rounding errors."""
    floors = shares.floor()
    return _add_missing(floors.long(), shares - floors, totals)


def _add_missing(floors: Tensor, remainders: Tensor, totals: Tensor) -> Tensor:
    order = remainders.sort(dim=-1, descending=True, stable=True).indices
    missing = (totals - floors.sum(-1)).unsqueeze(-1)
    bonus = (torch.arange(floors.shape[-1], device=floors.device) < missing).to(floors.dtype)
    return floors.scatter_add(-1, order, bonus.expand_as(floors).contiguous())
