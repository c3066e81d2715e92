"""Reading KV cache rows with torch, in any stored dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from kvevict_kernels.checks import FP8

WORD = torch.complex128
"""torch's dtype of 16 bytes; it is copied bit for bit."""


def gather_rows(buffer: Tensor, slots: Tensor, scale: float | Tensor = 1.0, dim: int = 0) -> Tensor:
    """Copy the rows at ``slots`` ([n], int, indices along ``dim``) of a KV buffer of any shape.

    ``scale`` is the FP8 scale, not read for other dtypes; a tensor must broadcast against the result. float8 rows are
    returned as float32, since torch has no float8 products, sums or norms; other rows are returned as stored.
    """
    if buffer.dtype != FP8:
        return torch.index_select(buffer, dim, slots)
    rows = torch.index_select(as_moved(buffer), dim, slots)
    return rows.view(FP8).float().mul_(scale)


def as_moved(rows: Tensor) -> Tensor:
    """View rows in a dtype that torch can gather and write: float8 as bytes, others unchanged."""
    return rows.view(torch.uint8) if rows.dtype == FP8 else rows


def as_words(rows: Tensor) -> Tensor:
    """View rows as words of 16 bytes, with which torch gathers fastest; like :func:`as_moved` where they do not fit."""
    ratio = WORD.itemsize // rows.element_size()
    *strides, last = rows.stride()
    starts = (rows.shape[-1], rows.storage_offset(), *strides)
    fits = last == 1 and rows.numel() > 0 and all(start % ratio == 0 for start in starts)
    return rows.view(WORD) if fits else as_moved(rows)
