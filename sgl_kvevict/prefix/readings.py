"""What passes pay the entries of a segment that was compressed before they came."""

from __future__ import annotations

from torch import Tensor


class EntryReadings:
    """The attention that passes paid each stored entry of a segment, squared and summed.

    It follows its segment: when entries move or leave (a squeeze, a repack), so do their sums.

    Args:
        squares: [num_entries], float32, in the order of the segment's entries.

    Attributes:
        squares: likewise, of the entries that the segment has now.
        is_open: more passes will come; what is closed is of no use to anybody.
    """

    def __init__(self, squares: Tensor) -> None:
        self.squares = squares
        self.is_open = True

    def keep(self, kept: Tensor) -> None:
        """Only some entries are left: ``kept``, [num_kept], int64, in order."""
        self.squares = self.squares[kept]
