"""Segments: what forwards record of a range, how its entries are ranked, and how the best of them are written.

Nothing here knows SGLang or the tree; :mod:`sgl_kvevict.cache` decides when which range is ranked and written.
"""

from sgl_kvevict.segments.packer import Rewritten, SegmentPacker
from sgl_kvevict.segments.prompt_observation import (
    CacheObservation,
    Observation,
    ObservationSpec,
    PromptObservation,
    Recorder,
)
from sgl_kvevict.segments.ranker import Compressor
from sgl_kvevict.segments.segment import CopiedEntries, Entries, Order, Packed, Rows, Segment, Span, View
from sgl_kvevict.segments.shadow import DraftRows
from sgl_kvevict.segments.sources import KeptRows, Range, Sources, TokenRange
from sgl_kvevict.segments.streams import SideStream
from sgl_kvevict.segments.text_attention import TextAttention
from sgl_kvevict.segments.warm_up import warm_up

__all__ = [
    "CacheObservation",
    "Compressor",
    "CopiedEntries",
    "DraftRows",
    "Entries",
    "KeptRows",
    "Observation",
    "ObservationSpec",
    "Order",
    "Packed",
    "PromptObservation",
    "Range",
    "Recorder",
    "Rewritten",
    "Rows",
    "Segment",
    "SegmentPacker",
    "SideStream",
    "Sources",
    "Span",
    "TextAttention",
    "TokenRange",
    "View",
    "warm_up",
]
