"""Short forms of :meth:`SegmentPacker.rewrite` for tests that have spans, and no table of them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sgl_kvevict.prefix import Segment, SegmentPacker, Sources, Span, TokenRange, live_view
from sgl_kvevict.ragged import MergePlan, Selection


def pack(
    packer: SegmentPacker,
    token_slots: Tensor,
    start: int,
    selection: Selection,
    *,
    merge: MergePlan | None = None,
    order: Tensor | None = None,
) -> tuple[Segment, Tensor]:
    """Write the selected entries of uncompressed tokens into as few of their slots as they take."""
    sources = Sources(packer.geometry, [TokenRange(token_slots, start)], selection)
    segment, freed = packer.rewrite(sources, sources.fewest_slots, bits=16, merge=merge)
    segment.order = order
    return segment, freed


def squeeze(packer: SegmentPacker, spans: Sequence[Span], num_slots: int) -> Tensor:
    """Keep the best entries of live spans in so many slots; return the others."""
    return _move(packer, spans, Sources(packer.geometry, [live_view(spans)]).best(num_slots), num_slots)


def repack(packer: SegmentPacker, spans: Sequence[Span]) -> Tensor:
    """Write what is alive into as few slots as it takes; return the others."""
    sources = Sources(packer.geometry, [live_view(spans)])
    return _move(packer, spans, sources, sources.fewest_slots)


def _move(packer: SegmentPacker, spans: Sequence[Span], sources: Sources, num_slots: int) -> Tensor:
    segment, freed = packer.rewrite(sources, num_slots, bits=16)
    for span in spans:
        span.move_to(segment)
    return freed
