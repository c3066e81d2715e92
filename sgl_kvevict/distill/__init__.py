"""Learned scores: linear maps from what the cache holds to what scoring passes would find, and how they are learned."""

from sgl_kvevict.distill.features import CachedRange, window_features
from sgl_kvevict.distill.files import (
    ModelIdentity,
    check_writable,
    find_weights,
    load_weights,
    save_weights,
    weights_folders,
)
from sgl_kvevict.distill.learner import Lesson, LessonResult, ScoreLearner
from sgl_kvevict.distill.weights import ScoreWeights

__all__ = [
    "CachedRange",
    "Lesson",
    "LessonResult",
    "ModelIdentity",
    "ScoreLearner",
    "ScoreWeights",
    "check_writable",
    "find_weights",
    "load_weights",
    "save_weights",
    "weights_folders",
    "window_features",
]
