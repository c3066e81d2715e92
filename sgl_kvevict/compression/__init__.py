"""Ranking of a range: observe, score, and order its entries."""

from sgl_kvevict.compression.collectors import needs_rotary
from sgl_kvevict.compression.compressor import Compressor
from sgl_kvevict.compression.generated import Generated, GeneratedCompressor, GeneratedStep
from sgl_kvevict.compression.prompt_observation import CacheObservation, Observation, ObservationSpec, PromptObservation
from sgl_kvevict.compression.reader_observation import MeasuredRange, ReaderChunk, ReaderObservation, bytes_of
from sgl_kvevict.compression.streams import SideStream
from sgl_kvevict.compression.warm_up import warm_up

__all__ = [
    "CacheObservation",
    "Compressor",
    "Generated",
    "GeneratedCompressor",
    "GeneratedStep",
    "MeasuredRange",
    "Observation",
    "ObservationSpec",
    "PromptObservation",
    "ReaderChunk",
    "ReaderObservation",
    "SideStream",
    "bytes_of",
    "needs_rotary",
    "warm_up",
]
