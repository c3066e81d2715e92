"""The named policies: a file has options, composition, source, and parts that no other policy uses."""

from sgl_kvevict.policies.methods.chunkkv import ChunkKV
from sgl_kvevict.policies.methods.d2o import D2O
from sgl_kvevict.policies.methods.distilled import Distilled
from sgl_kvevict.policies.methods.h2o import H2O
from sgl_kvevict.policies.methods.k_vec import KVec
from sgl_kvevict.policies.methods.random import Random
from sgl_kvevict.policies.methods.snapkv import AdaPyramidKV, AdaSnapKV, PyramidKV, SnapKV
from sgl_kvevict.policies.methods.streaming_llm import StreamingLLM
from sgl_kvevict.policies.options import NamedPolicy

METHODS: tuple[type[NamedPolicy], ...] = (
    Distilled,
    StreamingLLM,
    SnapKV,
    PyramidKV,
    H2O,
    AdaSnapKV,
    AdaPyramidKV,
    ChunkKV,
    D2O,
    KVec,
    Random,
)
"""In the order of listings."""

__all__ = ["METHODS"]
