"""From an observed prompt to a published segment: observe, budget, score, select, merge, pack."""

from sgl_kvevict.compression.collectors import needs_rotary
from sgl_kvevict.compression.compressor import Compression, Compressor, Observation
from sgl_kvevict.compression.generated import Suffix, SuffixCompressor, SuffixStep
from sgl_kvevict.compression.pending_fit import PendingFit
from sgl_kvevict.compression.prompt_observation import CacheObservation, PromptObservation
from sgl_kvevict.compression.reader_observation import ReaderChunk, ReaderObservation
from sgl_kvevict.compression.warm_up import warm_up

__all__ = [
    "CacheObservation",
    "Compression",
    "Compressor",
    "Observation",
    "PendingFit",
    "PromptObservation",
    "ReaderChunk",
    "ReaderObservation",
    "Suffix",
    "SuffixCompressor",
    "SuffixStep",
    "needs_rotary",
    "warm_up",
]
