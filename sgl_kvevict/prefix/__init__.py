"""Compressed spans and the segments that store them; radix logic that needs no sglang."""

from sgl_kvevict.prefix.copied import CopiedEntries, View
from sgl_kvevict.prefix.packer import SegmentPacker
from sgl_kvevict.prefix.readings import EntryReadings
from sgl_kvevict.prefix.span import Segment, Span

__all__ = ["CopiedEntries", "EntryReadings", "Segment", "SegmentPacker", "Span", "View"]
