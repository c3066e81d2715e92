"""Fitters: values and biases with which kept entries answer for evicted ones."""

from sgl_kvevict.policies.fitters.attention_matcher import AttentionMatcher

__all__ = ["AttentionMatcher"]
