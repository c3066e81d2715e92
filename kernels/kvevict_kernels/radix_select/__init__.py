"""The largest keys of each row, exactly, ties to the lower position: the threshold of a row, or a mask."""

from __future__ import annotations

import torch
from torch import Tensor

from kvevict_kernels.checks import check_index_range, check_int, check_tensor
from kvevict_kernels.dispatch import backend_for
from kvevict_kernels.radix_select.cpu import kth_largest_cpu, top_mask_cpu
from kvevict_kernels.radix_select.reference import kth_largest_reference, top_mask_reference

__all__ = ["kth_largest", "kth_largest_reference", "top_mask", "top_mask_reference"]

MAX_KEYS = 2**31 - 1  # of a row: kernels count keys in int32


def top_mask(keys: Tensor, counts: int | Tensor) -> Tensor:
    """Mark the ``counts`` largest keys of each row; ties to the lower position.

    Args:
        keys: [num_rows, n], int32 or int64, in signed order.
        counts: how many; one number for all rows, or [num_rows], int64, on the device of ``keys``; each in
            ``[0, n]``.

    Returns:
        [num_rows, n], bool; row ``i`` holds ``counts[i]`` times True.

    Raises:
        ValueError: wrong shape, dtype or device; a row beyond ``MAX_KEYS``; a number outside ``[0, n]``, on the CPU
            also in a tensor.

    Source: radix select (Alabi et al., ACM JEA 2012, "Fast k-selection algorithms for graphics processing units").
    Differs: counts per row that the host does not know, and a tie rule.
    Cost: on a device the keys are read once for each of their bytes, and once for the mask; at most 64 MiB of scratch,
        whatever the shape; no host sync; deterministic, no atomics but a program's own while it counts its keys. On
        the CPU a selection in each row for a number, a sort of each row for a tensor.
    """
    _check(keys, counts)
    if keys.numel() == 0:
        return torch.zeros_like(keys, dtype=torch.bool)
    if backend_for(keys.device) == "cpu":
        return top_mask_cpu(keys, counts)
    from kvevict_kernels.radix_select.triton_impl import top_mask_triton

    return top_mask_triton(keys, counts)


def kth_largest(keys: Tensor, counts: int | Tensor) -> Tensor:
    """The ``counts``-th largest key of each row, equal keys counted apart; the largest one where the count is 0.

    Args:
        keys: [num_rows, n], int32 or int64, in signed order; n >= 1.
        counts: as for :func:`top_mask`.

    Returns:
        [num_rows], dtype of ``keys``: fewer than ``counts`` keys are larger, and at least as many are not smaller.

    Raises:
        ValueError: as for :func:`top_mask`; n == 0.

    Source, cost: as :func:`top_mask`, without the mask.
    """
    _check(keys, counts)
    if keys.shape[1] == 0:
        raise ValueError("keys: expected at least one key in a row, got n = 0")
    if keys.numel() == 0:
        return keys.new_zeros(0)
    if backend_for(keys.device) == "cpu":
        return kth_largest_cpu(keys, counts)
    from kvevict_kernels.radix_select.triton_impl import kth_largest_triton

    return kth_largest_triton(keys, counts)


def _check(keys: Tensor, counts: int | Tensor) -> None:
    check_tensor("keys", keys, (None, None), (torch.int32, torch.int64))
    num_rows, n = keys.shape
    if n > MAX_KEYS:
        raise ValueError(f"keys: expected at most {MAX_KEYS} keys in a row, got {n}")
    if isinstance(counts, Tensor):
        check_tensor("counts", counts, (num_rows,), torch.int64, keys.device)
        check_index_range("counts", counts, n + 1)
    else:
        check_int("counts", counts, 0, n)
