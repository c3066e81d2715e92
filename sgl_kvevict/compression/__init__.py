"""Compression of a range: observe, score, select, merge, pack."""

from sgl_kvevict.compression.collectors import needs_rotary
from sgl_kvevict.compression.compressor import Chosen, Compression, Compressor, Observation, state_of
from sgl_kvevict.compression.generated import Generated, GeneratedCompressor, GeneratedStep
from sgl_kvevict.compression.prompt_observation import CacheObservation, ObservationSpec, PromptObservation
from sgl_kvevict.compression.reader_observation import ReaderChunk, ReaderObservation
from sgl_kvevict.compression.streams import SideStream
from sgl_kvevict.compression.warm_up import warm_up

__all__ = [
    "CacheObservation",
    "Chosen",
    "Compression",
    "Compressor",
    "Generated",
    "GeneratedCompressor",
    "GeneratedStep",
    "Observation",
    "ObservationSpec",
    "PromptObservation",
    "ReaderChunk",
    "ReaderObservation",
    "SideStream",
    "needs_rotary",
    "state_of",
    "warm_up",
]
