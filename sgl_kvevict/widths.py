"""How many entries of a segment fit its token slots in rows of 16 and of 4 bits: arithmetic on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sgl_kvevict.config import Bits
    from sgl_kvevict.geometry import KVGeometry

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
) -> tuple[Part, ...]:
    """How many of the entries of a range fit so many token slots, and how many of these get rows of which width.

    Numbers on the host alone decide, so tensor-parallel ranks agree. With 16 bits are all, if they fit, and always
    ``num_sinks`` entries. Of the others as many are kept as fit in rows of 4 bits (``auto``), or of 16. An entry does
    not get a wider row than it has: ``num_whole`` entries have 16 bits now (None: all).

    Returns:
        The widths, widest first, with at least one entry each (one width if there is none); together they take no more
        than ``num_slots`` token slots.
    """
    cells = num_slots * geometry.num_runs
    whole = num_entries if num_whole is None else num_whole
    if bits == 16 or (whole >= num_entries and num_entries <= cells):
        return ((16, min(num_entries, cells)),)
    with_16 = min(num_sinks, num_entries, cells, whole)
    with_4 = min(num_entries - with_16, (cells - with_16) * geometry.rows_per_slot(4))
    return tuple(part for part in ((16, with_16), (4, with_4)) if part[1]) or ((4, 0),)
