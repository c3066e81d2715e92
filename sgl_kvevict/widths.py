"""How many entries of a segment fit its token slots in rows of 16, 8 and 4 bits: arithmetic on the host."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sgl_kvevict.config import Bits
    from sgl_kvevict.geometry import KVGeometry

WIDE_SHARE = Fraction(1, 5)
"""Part of the entries with rows of 8 bits where the others have 4: those that come first in the order."""
Part = tuple[int, int]
"""Bits of a row, and how many entries have such rows."""


def rows_that_fit(
    geometry: KVGeometry,
    num_slots: int,
    num_entries: int,
    bits: Bits,
    *,
    num_sinks: int = 0,
    num_whole: int | None = None,
    num_wide: int | None = None,
) -> tuple[Part, ...]:
    """How many of the entries of a range fit so many token slots, and how many of these get rows of which width.

    Numbers on the host alone decide, so tensor-parallel ranks agree. With 16 bits are all, if they fit, and always
    ``num_sinks`` entries. The others, by ``bits``:

    * ``auto``: every entry, with as many rows of 8 bits as fit beside the others' 4. If not even :data:`WIDE_SHARE` of
      them would, fewer entries are kept (as many in each run, on average), this share of them with 8 bits.
    * 16, 8, 4: as many entries as fit in rows of this width.

    An entry does not get a wider row than it has: ``num_whole`` entries have 16 bits now, ``num_wide`` of them and of
    the others at least 8 (None: all).

    Returns:
        The widths, widest first, with at least one entry each (one width if there is none); together they take no more
        than ``num_slots`` token slots.
    """
    cells = num_slots * geometry.num_runs
    whole = num_entries if num_whole is None else num_whole
    if bits == 16 or (whole >= num_entries and num_entries <= cells):
        return ((16, min(num_entries, cells)),)
    with_16 = min(num_sinks, num_entries, cells, whole)
    cells, others = cells - with_16, num_entries - with_16
    wide, narrow = geometry.rows_per_slot(8), geometry.rows_per_slot(4)
    if bits == "auto":
        most = cells / (WIDE_SHARE / wide + (1 - WIDE_SHARE) / narrow)
        kept = min(others, int(most / geometry.num_runs) * geometry.num_runs)
        with_8 = min(kept, (cells * narrow - kept) * wide // (narrow - wide))
        while -(-with_8 // wide) - (with_8 - kept) // narrow > cells:  # parts of head slots count as whole ones
            with_8 -= 1
        most_wide = others if num_wide is None else max(num_wide - with_16, 0)
        if most_wide < with_8:
            # a head slot that their last rows do not fill may hold more entries with 4 bits
            plans = (most_wide, most_wide - most_wide % wide)
            kept, with_8 = max((min(others, rows + narrow * (cells - -(-rows // wide))), rows) for rows in plans)
    else:
        kept = min(others, cells * geometry.rows_per_slot(bits))
        with_8 = kept if bits == 8 else 0
    parts = tuple(part for part in ((16, with_16), (8, with_8), (4, kept - with_8)) if part[1])
    return parts or ((8, 0),)
