"""Compressed spans and the segments that store them; without sglang."""

from sgl_kvevict.prefix.packer import SegmentPacker
from sgl_kvevict.prefix.shadow import CopiedShadow, DraftRows
from sgl_kvevict.prefix.sources import Sources, TokenRange
from sgl_kvevict.prefix.span import CopiedEntries, Entries, EntryAttention, Segment, Span, View, live_view

__all__ = [
    "CopiedEntries",
    "CopiedShadow",
    "DraftRows",
    "Entries",
    "EntryAttention",
    "Segment",
    "SegmentPacker",
    "Sources",
    "Span",
    "TokenRange",
    "View",
    "live_view",
]
