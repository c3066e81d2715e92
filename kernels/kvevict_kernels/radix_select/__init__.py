"""Exact top-k, ties to the lower position: the threshold of a row, a mask, or the entries of all runs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvevict_kernels.checks import check_index_range, check_int, check_tensor
from kvevict_kernels.dispatch import implementation

__all__ = ["kth_largest", "largest_entries", "top_mask"]

MAX_KEYS = 2**31 - 1  # of a row: kernels count keys in int32
KEYS_AT_ONCE = 2**18
"""Keys sorted at a time: limits the temporaries (sorted keys, their indices, running counts of ties)."""
LONG_ROW = 2**15
"""From this length torch sorts a single row of integers by radix sort, several times as fast."""


def top_mask(keys: Tensor, counts: int | Tensor) -> Tensor:
    """Mark the ``counts`` largest keys of each row; ties to the lower position.

    Args:
        keys: [num_rows, n], int16, int32 or int64, in signed order.
        counts: one number for all rows, or [num_rows], int64, on the device of ``keys``; each in ``[0, n]``.

    Returns:
        [num_rows, n], bool; row ``i`` has ``counts[i]`` times True.

    Raises:
        ValueError: wrong shape, dtype or device; a row longer than ``MAX_KEYS``; a count outside ``[0, n]`` (in a
            tensor: checked on the CPU only).

    Source: radix select (Alabi et al., ACM JEA 2012, "Fast k-selection algorithms for graphics processing units").
    Differs: counts per row that the host does not know, and a tie rule.
    Cost: on a device the keys are read once per byte of a key, and once for the mask; at most 64 MiB of scratch; no
        host sync; deterministic (histograms use atomics within a program only); keys of 16 bits are widened to 32. On
        the CPU one selection per row for a number, one sort per row for a tensor; for a number and keys of 16 bits one
        histogram per row.
    """
    _check(keys, counts)
    if keys.numel() == 0:
        return torch.zeros_like(keys, dtype=torch.bool)
    return implementation(keys.device, top_mask_cpu, "radix_select")(keys, counts)


def kth_largest(keys: Tensor, counts: int | Tensor) -> Tensor:
    """The ``counts``-th largest key of each row, equal keys counted separately; the largest one where the count is 0.

    Arguments, errors, source and cost (without the mask) as for :func:`top_mask`; n >= 1.

    Returns:
        [num_rows], dtype of ``keys``: fewer than ``counts`` keys are larger, and at least as many are not smaller.
    """
    _check(keys, counts)
    if keys.shape[1] == 0:
        raise ValueError("keys: expected at least one key in a row, got n = 0")
    if keys.numel() == 0:
        return keys.new_zeros(0)
    return implementation(keys.device, kth_largest_cpu, "radix_select")(keys, counts).to(keys.dtype)


def largest_entries(keys: Tensor, indptr: Tensor, num_entries: int) -> tuple[Tensor, Tensor]:
    """Choose the entries of largest key of all runs together; ties to the lower number.

    Args:
        keys: [n], int16, int32 or int64, of the entries of all runs, one run after the other.
        indptr: [num_runs + 1], int32 or int64, from 0 to n: the runs' starts.
        num_entries: how many; in ``[0, n]``.

    Returns:
        Numbers of the chosen entries, [num_entries], int64, ascending, and how many each run has, [num_runs], int32.

    Raises:
        ValueError: see :func:`top_mask`; wrong shape, dtype or device of ``indptr``.

    Source and cost as for :func:`top_mask`.
    """
    check_tensor("indptr", indptr, (None,), (torch.int32, torch.int64), keys.device)
    # The size is known, so the host does not wait for the device.
    numbers = torch.nonzero_static(top_mask(keys[None], num_entries)[0], size=num_entries).squeeze(-1)
    return numbers, torch.searchsorted(numbers, indptr.long()).diff().int()


def _check(keys: Tensor, counts: int | Tensor) -> None:
    check_tensor("keys", keys, (None, None), (torch.int16, torch.int32, torch.int64))
    num_rows, n = keys.shape
    if n > MAX_KEYS:
        raise ValueError(f"keys: expected at most {MAX_KEYS} keys in a row, got {n}")
    if isinstance(counts, Tensor):
        check_tensor("counts", counts, (num_rows,), torch.int64, keys.device)
        check_index_range("counts", counts, n + 1)
    else:
        check_int("counts", counts, 0, n)


def top_mask_cpu(keys: Tensor, counts: int | Tensor) -> Tensor:
    """CPU path of :func:`top_mask`: the k-th value, or a sort where rows differ in k; then ties from the left."""
    if isinstance(counts, int) and counts == 0:
        return torch.zeros_like(keys, dtype=torch.bool)
    if isinstance(counts, int) and keys.dtype == torch.int16:
        return torch.stack([_top_of_16_bits(row, counts) for row in keys])
    masks = []
    for rows, count in _row_groups(keys, counts):
        threshold = _kth_largest(rows, count).unsqueeze(-1)
        above = rows > threshold
        ties = rows == threshold
        missing = (count - above.sum(-1)).unsqueeze(-1)
        masks.append(above | (ties & (ties.cumsum(-1) <= missing)))
    return torch.cat(masks)


def _top_of_16_bits(row: Tensor, count: int) -> Tensor:
    """Mark the ``count`` >= 1 largest of one row's keys, [n], int16; ties to the lower position."""
    limits = torch.iinfo(torch.int16)
    # 65,536 possible keys: a histogram is one pass, where a selection takes several.
    from_top = torch.bincount(row.int().neg_().add_(limits.max), minlength=2**16).cumsum(0)
    place = int(torch.searchsorted(from_top, count))
    mask = row >= limits.max - place
    surplus = int(from_top[place]) - count
    if surplus:
        ties = (row == limits.max - place).nonzero().squeeze(-1)
        mask[ties[-surplus:]] = False
    return mask


def kth_largest_cpu(keys: Tensor, counts: int | Tensor) -> Tensor:
    """CPU path of :func:`kth_largest`."""
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
