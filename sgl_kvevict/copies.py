"""Copies of what a segment holds, outside the pool: on the pool's device, in the host's memory, or read from a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvevict_kernels.radix_select import largest_entries
from kvevict_kernels.row_sizes import WIDTHS
from sgl_kvevict.ragged import runs_of


@dataclass(frozen=True, eq=False)
class CopiedRows:
    """Entries whose rows have one width.

    Attributes:
        keep_lens: [num_layers, num_kv_heads], int32, entries per run.
        positions: [num_entries], int32, logical positions, run after run, ascending within a run.
        k: [num_entries, head_dim] in the pool's dtype; of 4 bits uint8, [num_entries, bytes of a row].
        v: the same; without columns if values are a part of the keys' rows.
        order: [num_entries], int16, the keys of their order; None: unknown.
    """

    keep_lens: Tensor
    positions: Tensor
    k: Tensor
    v: Tensor
    order: Tensor | None = None

    @property
    def bits(self) -> int:
        """Width of a number in a row: 4, or 16 (as the pool stores it)."""
        return WIDTHS[self.k.dtype == torch.uint8]

    @property
    def num_entries(self) -> int:
        """Entries of all runs."""
        return self.positions.numel()

    def within(self, start: int, end: int) -> CopiedRows:
        """The entries of the tokens ``[start, end)``."""
        kept, keep_lens = _within(start, end, self.positions, self.keep_lens)
        return self._at(kept, keep_lens)

    def best(self, num_entries: int) -> CopiedRows:
        """So many entries, the best of all runs by their order, which is known; ties to the lower number."""
        assert self.order is not None
        starts = pad(self.keep_lens.flatten().cumsum(0), (1, 0))
        numbers, lens = largest_entries(self.order, starts, num_entries)
        return self._at(numbers, lens.view_as(self.keep_lens))

    @staticmethod
    def joined(some: Sequence[CopiedRows]) -> CopiedRows:
        """Different entries of one width as one copy; what is not known of one is not known of any."""
        if len(some) == 1:
            return some[0]
        lens = torch.stack([rows.keep_lens for rows in some])
        k, v, positions = (torch.cat([getattr(rows, name) for rows in some]) for name in ("k", "v", "positions"))
        known = [rows.order for rows in some if rows.order is not None]
        runs = torch.cat([runs_of(own, rows.num_entries) for own, rows in zip(lens, some, strict=True)])
        every = CopiedRows(lens, positions, k, v, torch.cat(known) if len(known) == len(some) else None)
        # Run and position in one int64: one sort orders the entries of all copies.
        return every._at((runs << 32 | positions).argsort(), lens.sum(0, dtype=torch.int32))

    def _at(self, numbers: Tensor, keep_lens: Tensor) -> CopiedRows:
        """Entries that a mask or numbers select."""
        positions, k, v = (_rows_at(rows, numbers) for rows in (self.positions, self.k, self.v))
        return CopiedRows(keep_lens, positions, k, v, None if self.order is None else self.order[numbers])


@dataclass(frozen=True, eq=False)
class Copy:
    """Tensors in blocks of the host's memory, which are written once.

    Attributes:
        shapes: their shapes and dtypes, without contents, in the order in which they lie there.
        blocks: numbers of the blocks; none: it is lost.
    """

    shapes: dict[str, Tensor]
    blocks: list[int]


@dataclass(frozen=True, eq=False)
class EvictedPart(Copy):
    """Entries that one resize evicted from a segment, as :class:`CopiedRows`.

    Whoever has it, segments in the pool and in the host's memory, reads those of its own tokens alone.

    Attributes:
        start: logical position of the first token whose entries count.
        end: logical position after the last one.
        is_cut: there are entries of other tokens, too.
    """

    start: int
    end: int
    is_cut: bool = False

    @property
    def num_entries(self) -> int:
        """Entries of all tokens."""
        return self.shapes["positions"].numel()

    def within(self, start: int, end: int) -> EvictedPart:
        """The part of the tokens of both, which may be none; in the same blocks."""
        bounds = max(start, self.start), min(end, self.end)
        return self if bounds == (self.start, self.end) else EvictedPart(self.shapes, self.blocks, *bounds, is_cut=True)


@dataclass(frozen=True, eq=False)
class CopiedSinks:
    """The first tokens of a path, all of whose entries have rows of 16 bits.

    Attributes:
        k: [num_layers, num_tokens, num_kv_heads, head_dim], in the pool's dtype.
        v: the same.
    """

    k: Tensor
    v: Tensor

    @staticmethod
    def joined(some: Sequence[CopiedSinks]) -> CopiedSinks:
        """Consecutive tokens as one copy."""
        return CopiedSinks(*(torch.cat([getattr(sinks, name) for sinks in some], dim=1) for name in "kv"))

    def after(self, num_tokens: int) -> CopiedSinks:
        """Those behind the first ``num_tokens`` tokens."""
        return CopiedSinks(self.k[:, num_tokens:], self.v[:, num_tokens:])


@dataclass(frozen=True)
class CopiedEntries:
    """Entries of a range of a path.

    Attributes:
        rows: of all tokens behind the sinks.
        sinks: None: there are none.
    """

    rows: CopiedRows
    sinks: CopiedSinks | None = None

    @property
    def num_sinks(self) -> int:
        """How many tokens the sinks are."""
        return 0 if self.sinks is None else self.sinks.k.shape[1]

    @property
    def num_entries(self) -> int:
        """Entries of all tokens."""
        return self.num_sinks * self.rows.keep_lens.numel() + self.rows.num_entries

    def after(self, num_tokens: int, position: int, end: int) -> CopiedEntries:
        """Those of the tokens ``[position, end)``, behind the first ``num_tokens`` ones."""
        left = None if self.sinks is None or self.num_sinks <= num_tokens else self.sinks.after(num_tokens)
        return CopiedEntries(self.rows.within(position, end), left)

    @staticmethod
    def joined(some: Sequence[CopiedEntries]) -> CopiedEntries:
        """Those of consecutive ranges, whose rows have one width, as one copy."""
        sinks = [each.sinks for each in some if each.sinks is not None]
        return CopiedEntries(
            CopiedRows.joined([each.rows for each in some]), CopiedSinks.joined(sinks) if sinks else None
        )


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
