"""Segments: what forwards record of a range, how its entries are ranked, and how the best of them are written.

Nothing here knows SGLang or the tree; :mod:`sgl_kvevict.cache` decides when which range is ranked and written.
"""

from sgl_kvevict.segments.packer import SegmentPacker
from sgl_kvevict.segments.prompt_observation import (
    CacheObservation,
    Observation,
    ObservationSpec,
    PromptObservation,
    Recorder,
)
from sgl_kvevict.segments.ranker import Compressor
from sgl_kvevict.segments.segment import Order, Packed, Rows, Segment, Span, View
from sgl_kvevict.segments.shadow import DraftRows
from sgl_kvevict.segments.sources import KeptRows, Range, Source, TokenRange
from sgl_kvevict.segments.streams import SideStream
from sgl_kvevict.segments.text_attention import TextAttention
from sgl_kvevict.segments.warm_up import warm_up

__all__ = [
    "CacheObservation",
    "Compressor",
    "DraftRows",
    "KeptRows",
    "Observation",
    "ObservationSpec",
    "Order",
    "Packed",
    "PromptObservation",
    "Range",
    "Recorder",
    "Rows",
    "Segment",
    "SegmentPacker",
    "SideStream",
    "Source",
    "Span",
    "TextAttention",
    "TokenRange",
    "View",
    "warm_up",
]
