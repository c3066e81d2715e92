"""Deterministic ranking: scores to integer keys, and exact top-k without a host sync.

Ties go to the lower position (``kvevict_kernels.radix_select``); ``torch.topk`` may return any of equal elements.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvevict_kernels import radix_select

_DROPPED_BITS = 3
"""Low mantissa bits ignored when a second score breaks ties: scores within about 5e-7 are equal."""


def order_keys(values: Tensor, tie_break: Tensor | None = None) -> Tensor:
    """Integers in the order of the scores (float32, no NaN); int32, or int64 with ``tie_break``.

    ``tie_break``, float32, decides between values that are equal up to rounding errors. Ada-KV leaves ties open;
    pooling makes them frequent.
    """
    primary = _ordered_bits(values)
    if tie_break is None:
        return primary
    # Rounded, not cut: round numbers such as 0.5 lie just at a cut, and rounding errors put them on both sides of it.
    rounded = ((primary.long() + (1 << (_DROPPED_BITS - 1))) >> _DROPPED_BITS) << _DROPPED_BITS
    # Shifted to be positive: the lower half must not borrow from the upper one.
    return (rounded << 32) + (_ordered_bits(tie_break).long() + 2**31)


def _ordered_bits(values: Tensor) -> Tensor:
    bits = (values.float() + 0.0).contiguous().view(torch.int32)  # + 0.0: -0.0 becomes 0.0
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def key_max(keys: Tensor) -> int:
    """The largest key of the dtype, which ranks first."""
    return torch.iinfo(keys.dtype).max


def top_mask(keys: Tensor, counts: int | Tensor) -> Tensor:
    """[..., num_tokens], bool: the ``counts`` largest integer keys of each row; ties to the lower position.

    ``counts`` is one number, or [...] int64 on the device, each in ``[0, num_tokens]``.
    """
    rows = keys.reshape(keys.shape[:-1].numel(), keys.shape[-1]).contiguous()
    per_row = counts if isinstance(counts, int) else counts.reshape(-1).contiguous()
    return radix_select.top_mask(rows, per_row).view(keys.shape)


def top_counts(keys: Tensor, totals: int | Tensor) -> Tensor:
    """[groups, rows], int64: each row's number of keys among its group's ``totals`` largest (Ada-KV, Alg. 1).

    ``keys`` is [groups, rows, num_tokens], integer; ties go to the lower row, then position.
    """
    threshold = radix_select.kth_largest(keys.flatten(1).contiguous(), totals)[:, None, None]
    above = (keys > threshold).sum(-1)
    ties = (keys == threshold).sum(-1)
    # Ties are given to rows in order: a threshold alone would keep all of them, or none.
    return above + fill_in_order(ties, (totals - above.sum(-1)).unsqueeze(-1))


def fill_in_order(capacities: Tensor, amount: Tensor | int) -> Tensor:
    """Split ``amount`` ([..., 1] or one number): fill the capacities [..., n], int64, from the first one on."""
    before = capacities.cumsum(-1) - capacities
    return torch.minimum((amount - before).clamp(min=0), capacities)
