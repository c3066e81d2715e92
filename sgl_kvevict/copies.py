"""Copies of what a segment holds, outside the pool: on the pool's device, in the host's memory, or read from a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class CopiedRows:
    """Entries of one width.

    Attributes:
        bits: width of a number in their rows; 16: as the pool stores it.
        keep_lens: [num_layers, num_kv_heads], int32, entries per run.
        positions: [num_entries], int32, logical positions, run after run, ascending within a run.
        k: [num_entries, head_dim] in the pool's dtype; of fewer than 16 bits uint8, [num_entries, bytes of a row].
        v: the same; without columns if values are a part of the keys' rows.
    """

    bits: int
    keep_lens: Tensor
    positions: Tensor
    k: Tensor
    v: Tensor

    def within(self, start: int, end: int) -> tuple[CopiedRows, Tensor]:
        """The entries of the tokens ``[start, end)``, and a mask, [num_entries], of those that they are."""
        kept, keep_lens = _within(start, end, self.positions, self.keep_lens)
        positions, k, v = (_rows_at(rows, kept) for rows in (self.positions, self.k, self.v))
        return CopiedRows(self.bits, keep_lens, positions, k, v), kept

    @staticmethod
    def joined(some: Sequence[CopiedRows]) -> tuple[CopiedRows, Tensor]:
        """Different entries of one width as one copy, and the number, [num_entries], that each had among all."""
        positions, k, v = (torch.cat([getattr(rows, name) for rows in some]) for name in ("positions", "k", "v"))
        lens = torch.stack([rows.keep_lens for rows in some])
        runs = torch.arange(lens[0].numel(), device=lens.device).repeat(len(some))
        # The size is known from the shapes, so nothing is read back from the device.
        runs = runs.repeat_interleave(lens.flatten().long(), output_size=positions.numel())
        # Run and position in one int64: one sort orders the entries of all copies.
        numbers = (runs << 32 | positions).argsort()
        positions, k, v = (_rows_at(rows, numbers) for rows in (positions, k, v))
        return CopiedRows(some[0].bits, lens.sum(0, dtype=torch.int32), positions, k, v), numbers


@dataclass(frozen=True, eq=False)
class CopiedShadow:
    """Rows of a draft model.

    Attributes:
        lens: [num_layers, num_kv_heads] of the draft model, int32, rows per run.
        positions: [num_rows], int32, as in :class:`CopiedRows`; some tokens may be behind the segment.
        k: [num_rows, head_dim], in the dtype of the draft's pool; like ``v``.
        paid: [num_rows], float32, the attention that each row was paid.
    """

    lens: Tensor
    positions: Tensor
    k: Tensor
    v: Tensor
    paid: Tensor

    def within(self, start: int, end: int) -> CopiedShadow:
        """The rows of the tokens ``[start, end)``."""
        kept, lens = _within(start, end, self.positions, self.lens)
        rows = (_rows_at(rows, kept) for rows in (self.positions, self.k, self.v, self.paid))
        return CopiedShadow(lens, *rows)


def _within(start: int, end: int, positions: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:
    """Which entries, run after run, are of the tokens ``[start, end)``, and how many these are in each run."""
    kept = (positions >= start) & (positions < end)
    runs = torch.repeat_interleave(lens.flatten().long())[kept]
    return kept, runs.bincount(minlength=lens.numel()).int().view(lens.shape)


def _rows_at(rows: Tensor, kept: Tensor) -> Tensor:
    """Rows of any dtype that a mask or numbers select."""
    numbers = torch.uint8 if rows.element_size() == 1 else rows.dtype  # torch selects no rows of float8
    return rows.view(numbers)[kept].view(rows.dtype)
