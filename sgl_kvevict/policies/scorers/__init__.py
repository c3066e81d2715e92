"""Scorers that several methods share; one that a single method has is in that method's file."""

from sgl_kvevict.policies.scorers.accumulated_attention import AccumulatedAttentionScorer
from sgl_kvevict.policies.scorers.reader_attention import ReaderAttentionScorer
from sgl_kvevict.policies.scorers.window_attention import WindowAttentionScorer

__all__ = ["AccumulatedAttentionScorer", "ReaderAttentionScorer", "WindowAttentionScorer"]
