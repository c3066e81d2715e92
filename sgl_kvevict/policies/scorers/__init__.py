"""Scorers: how important each token is to each head."""

from sgl_kvevict.policies.scorers.position import PositionScorer
from sgl_kvevict.policies.scorers.window_attention import WindowAttentionScorer

__all__ = ["PositionScorer", "WindowAttentionScorer"]
