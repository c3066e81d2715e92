"""Compressed spans and the segments that store them; without sglang."""

from sgl_kvevict.prefix.packer import SegmentPacker
from sgl_kvevict.prefix.shadow import CopiedShadow, DraftRows
from sgl_kvevict.prefix.span import CopiedEntries, EntryAttention, Segment, Span, View

__all__ = [
    "CopiedEntries",
    "CopiedShadow",
    "DraftRows",
    "EntryAttention",
    "Segment",
    "SegmentPacker",
    "Span",
    "View",
]
