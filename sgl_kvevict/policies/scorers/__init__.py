"""Scorers: how important each token is to each head."""

from sgl_kvevict.policies.scorers.accumulated_attention import AccumulatedAttentionScorer
from sgl_kvevict.policies.scorers.cross_head import CrossHeadScorer
from sgl_kvevict.policies.scorers.distilled import DistilledScorer
from sgl_kvevict.policies.scorers.echo_attention import EchoAttentionScorer
from sgl_kvevict.policies.scorers.expected_attention import ExpectedAttentionScorer
from sgl_kvevict.policies.scorers.key_difference import KeyDifferenceScorer
from sgl_kvevict.policies.scorers.key_norm import KeyNormScorer
from sgl_kvevict.policies.scorers.position import PositionScorer
from sgl_kvevict.policies.scorers.random import RandomScorer
from sgl_kvevict.policies.scorers.reader_attention import ReaderAttentionScorer
from sgl_kvevict.policies.scorers.robust_attention import RobustAttentionScorer
from sgl_kvevict.policies.scorers.window_attention import WindowAttentionScorer
from sgl_kvevict.policies.scorers.window_logits import WindowLogitsScorer

__all__ = [
    "AccumulatedAttentionScorer",
    "CrossHeadScorer",
    "DistilledScorer",
    "EchoAttentionScorer",
    "ExpectedAttentionScorer",
    "KeyDifferenceScorer",
    "KeyNormScorer",
    "PositionScorer",
    "RandomScorer",
    "ReaderAttentionScorer",
    "RobustAttentionScorer",
    "WindowAttentionScorer",
    "WindowLogitsScorer",
]
