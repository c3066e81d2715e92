"""Mergers: what evicted rows leave behind in kept ones."""

from sgl_kvevict.policies.mergers.nearest_key import NearestKeyMerger

__all__ = ["NearestKeyMerger"]
