"""radix_select in vectorised torch: the k-th value, or a sort where rows differ in k; then ties from the left."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

KEYS_AT_ONCE = 2**18
"""Bounds the temporaries (a sort and its indices, a running count of ties): some rows after the others."""
LONG_ROW = 2**15
"""From here torch sorts a row of integers by their digits, several times as fast, if the row comes alone."""


def top_mask_cpu(keys: Tensor, counts: int | Tensor) -> Tensor:
    """CPU path of :func:`kvevict_kernels.radix_select.top_mask`."""
    if isinstance(counts, int) and counts == 0:
        return torch.zeros_like(keys, dtype=torch.bool)
    masks = []
    for rows, count in _row_groups(keys, counts):
        threshold = _kth_largest(rows, count).unsqueeze(-1)
        above = rows > threshold
        ties = rows == threshold
        missing = (count - above.sum(-1)).unsqueeze(-1)
        masks.append(above | (ties & (ties.cumsum(-1) <= missing)))
    return torch.cat(masks)


def kth_largest_cpu(keys: Tensor, counts: int | Tensor) -> Tensor:
    """CPU path of :func:`kvevict_kernels.radix_select.kth_largest`."""
    return torch.cat([_kth_largest(rows, count) for rows, count in _row_groups(keys, counts)])


def _row_groups(keys: Tensor, counts: int | Tensor) -> Iterator[tuple[Tensor, int | Tensor]]:
    size = max(KEYS_AT_ONCE // keys.shape[1], 1)
    for first in range(0, keys.shape[0], size):
        group = slice(first, first + size)
        yield keys[group], counts if isinstance(counts, int) else counts[group]


def _kth_largest(keys: Tensor, counts: int | Tensor) -> Tensor:
    if isinstance(counts, int):
        return keys.kthvalue(keys.shape[1] - max(counts, 1) + 1, dim=-1).values
    if keys.shape[1] < LONG_ROW:
        ascending = keys.sort(dim=-1).values
    else:
        ascending = torch.stack([row.sort().values for row in keys])
    return ascending.gather(-1, (keys.shape[1] - counts.clamp(min=1)).unsqueeze(-1)).squeeze(-1)
