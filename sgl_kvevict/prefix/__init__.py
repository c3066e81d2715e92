"""Compressed spans and the segments that store them; without sglang."""

from sgl_kvevict.prefix.packer import SegmentPacker
from sgl_kvevict.prefix.shadow import DraftRows
from sgl_kvevict.prefix.span import CopiedEntries, EntryAttention, Segment, Span, View

__all__ = ["CopiedEntries", "DraftRows", "EntryAttention", "Segment", "SegmentPacker", "Span", "View"]
