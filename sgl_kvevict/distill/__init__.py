"""What is learned of a model before it is served: scores of cached tokens, and statistics of its keys and values.

Scores are linear maps from cached keys and values to the logarithm of the attention that later queries pay. They are
learned from texts that the model repeats. Rows of few bits are written and read with the statistics.
"""

from sgl_kvevict.distill.features import CachedRange, window_features
from sgl_kvevict.distill.files import (
    Learned,
    ModelIdentity,
    all_weights,
    cached_file,
    load_learned,
    save_learned,
    weights_folders,
)
from sgl_kvevict.distill.learner import ScoredText, ScoreLearner
from sgl_kvevict.distill.row_sums import RowSums
from sgl_kvevict.distill.weights import LearnedScores, ScoreWeights, with_learned_scores

__all__ = [
    "CachedRange",
    "Learned",
    "LearnedScores",
    "ModelIdentity",
    "RowSums",
    "ScoreLearner",
    "ScoreWeights",
    "ScoredText",
    "all_weights",
    "cached_file",
    "load_learned",
    "save_learned",
    "weights_folders",
    "window_features",
    "with_learned_scores",
]
