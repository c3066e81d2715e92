"""Rows and biases of a segment's entries, as the arena has them."""

from __future__ import annotations

from torch import Tensor

from sgl_kvevict.prefix import Segment, SegmentPacker, View


def rows_of(store: SegmentPacker, segment: Segment) -> tuple[Tensor, Tensor]:
    """Keys and values, [num_entries, head_dim]."""
    copied = store.copy([View(segment, segment.start, segment.end)])
    return copied.k, copied.v


def biases_of(store: SegmentPacker, segment: Segment) -> Tensor | None:
    """[num_entries], float32; None: it is not fitted."""
    return store.copy([View(segment, segment.start, segment.end)]).biases
