"""Sizes of rows of 16 and of 4 bits: the numbers that all packages share, without torch."""

from __future__ import annotations

GROUP = 32
"""head_dim is a multiple of it where rows have 4 bits: kernels read so many codes at once."""
WIDTHS = (16, 4)
"""Bits of a number in a row; 16 stands for whatever the pool's dtype has."""
ROWS_IN_PLACE = 4
"""Rows of 4 bits in the place of one of 16."""
ROWS_PER_SLOT = dict(zip(WIDTHS, (1, ROWS_IN_PLACE), strict=True))
"""Rows of a head slot, by their bits."""
STEP_BYTES = 2
"""Of the step of a row of 4 bits."""
MAX_ROWS = 2**31 - 1024
"""Row numbers are int32; one block of headroom, so that offsets in kernels never wrap."""


def row_bytes(bits: int, head_dim: int, itemsize: int = 2) -> int:
    """Bytes of a row outside of an arena: of 16 bits numbers of so many bytes, of 4 bits its codes, then its step."""
    return head_dim * itemsize if bits == WIDTHS[0] else head_dim // 2 + STEP_BYTES
