"""Segments (in place or packed), their spans, and the packer that writes them; without sglang."""

from sgl_kvevict.prefix.packer import Rewritten, SegmentPacker
from sgl_kvevict.prefix.shadow import CopiedShadow, DraftRows
from sgl_kvevict.prefix.sources import Part, Sources, TokenRange
from sgl_kvevict.prefix.span import CopiedEntries, Entries, Order, Packed, Segment, Span, View

__all__ = [
    "CopiedEntries",
    "CopiedShadow",
    "DraftRows",
    "Entries",
    "Order",
    "Packed",
    "Part",
    "Rewritten",
    "Segment",
    "SegmentPacker",
    "Sources",
    "Span",
    "TokenRange",
    "View",
]
