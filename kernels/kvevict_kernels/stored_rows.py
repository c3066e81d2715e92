"""Rows of a KV cache as torch reads them, in any stored dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from kvevict_kernels.checks import FP8


def gather_rows(buffer: Tensor, slots: Tensor, scale: float | Tensor = 1.0, dim: int = 0) -> Tensor:
    """Copy rows at some slots.

    Args:
        buffer: any shape; bfloat16, float16, float32, or float8_e4m3fn, which is multiplied by ``scale``.
        slots: [n], int, indices along ``dim``.
        scale: FP8 scale, not read for other dtypes. A tensor must broadcast against the result.
        dim: dimension of the slots.

    Returns:
        The rows as they are, or float32 for float8: products, sums and norms of float8 do not exist.
    """
    if buffer.dtype != FP8:
        return torch.index_select(buffer, dim, slots)
    rows = torch.index_select(as_moved(buffer), dim, slots)
    return rows.view(FP8).float().mul_(scale)


def as_moved(rows: Tensor) -> Tensor:
    """View rows in a dtype that can be gathered and written: float8 as bytes, others as they are."""
    return rows.view(torch.uint8) if rows.dtype == FP8 else rows
