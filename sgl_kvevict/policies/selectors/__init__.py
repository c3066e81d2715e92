"""Selectors: which tokens each (layer, head) keeps."""

from sgl_kvevict.policies.selectors.chunk import ChunkSelector
from sgl_kvevict.policies.selectors.coverage import CoverageSelector
from sgl_kvevict.policies.selectors.recent import HeavyHitterSelector
from sgl_kvevict.policies.selectors.top_k import TopKSelector

__all__ = ["ChunkSelector", "CoverageSelector", "HeavyHitterSelector", "TopKSelector"]
