"""Selectors: which tokens each (layer, head) keeps."""

from sgl_kvevict.policies.selectors.top_k import TopKSelector

__all__ = ["TopKSelector"]
