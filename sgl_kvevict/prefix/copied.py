"""Parts of segments, and copies of their entries that are in no pool."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sgl_kvevict.prefix.span import Segment


@dataclass(frozen=True)
class View:
    """Consecutive tokens of a segment.

    Attributes:
        segment: which.
        start: logical position of the first token.
        end: logical position after the last one.
    """

    segment: Segment
    start: int
    end: int

    @property
    def is_whole(self) -> bool:
        """Whether it has all entries of its segment."""
        return (self.start, self.end) == (self.segment.start, self.segment.end)


@dataclass(frozen=True)
class CopiedEntries:
    """Entries that are in no pool.

    Attributes:
        keep_lens: [num_layers, num_kv_heads], int32, entries of each run.
        positions: [num_entries], int32, see :attr:`Segment.positions`.
        k: [num_entries, head_dim], in the arena's dtype, on its device.
        v: likewise.
        worth: [num_entries], int16, see :attr:`Segment.worth`.
        biases: [num_entries], float32; None: none of them is fitted.
    """

    keep_lens: Tensor
    positions: Tensor
    k: Tensor
    v: Tensor
    worth: Tensor | None
    biases: Tensor | None
