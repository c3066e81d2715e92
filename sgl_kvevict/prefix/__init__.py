"""Compressed spans and the segments that store them; radix logic that needs no sglang."""

from sgl_kvevict.prefix.span import CopiedEntries, EntryAttention, Segment, Span, View
from sgl_kvevict.prefix.store import SpanStore

__all__ = ["CopiedEntries", "EntryAttention", "Segment", "Span", "SpanStore", "View"]
