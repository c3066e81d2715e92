"""Learned scores: linear maps from cached keys and values to log reader attention, learned from scoring passes."""

from sgl_kvevict.distill.features import CachedRange, window_features
from sgl_kvevict.distill.files import (
    ModelIdentity,
    cached_file,
    find_weights,
    load_weights,
    save_weights,
    weights_folders,
)
from sgl_kvevict.distill.learner import ScoredText, ScoreLearner
from sgl_kvevict.distill.weights import LearnedScores, ScoreWeights, with_learned_scores

__all__ = [
    "CachedRange",
    "LearnedScores",
    "ModelIdentity",
    "ScoreLearner",
    "ScoreWeights",
    "ScoredText",
    "cached_file",
    "find_weights",
    "load_weights",
    "save_weights",
    "weights_folders",
    "window_features",
    "with_learned_scores",
]
