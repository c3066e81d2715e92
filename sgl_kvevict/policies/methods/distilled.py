"""``distilled``: attention that scores predict, which ``sgl_kvevict/distill/`` learns once a model; the default."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sgl_kvevict.policies.layer_view import LayerView
from sgl_kvevict.policies.options import BudgetOptions, BudgetRule
from sgl_kvevict.policies.parts import Scorer, TokenScores, Trait
from sgl_kvevict.policies.policy import Policy
from sgl_kvevict.policies.signals import Signal

WINDOW_SIZE = 8
"""Queries. 32 predict no better, and cost as much as all other features together."""
NORM_FLOOR = 1e-6
"""Least distance whose logarithm is taken."""


@dataclass(frozen=True)
class DistilledScorer(Scorer):
    """Predicted attention of later queries, times how far the token's value is from the head's mean value.

    Softmax weights add up to 1, so what is evicted is missed by this distance: a value near the mean is replaced by the
    others. Distances are shares of the layer's mean.
    The attention of the prompt's last ``WINDOW_SIZE`` queries is a feature of learned scores
    (:class:`sgl_kvevict.distill.weights.ScoreWeights`).

    Source: VATP (arXiv 2406.12335), Sec. 3, multiplies attention by the norm of the value.
    Differs: its distance from the mean, relative to the layer, because scores are compared over layers, and values grow
        with the residual stream.
    """

    window_size = WINDOW_SIZE
    needs = frozenset({Signal.LEARNED_SCORES, Signal.KEYS, Signal.VALUES, Signal.WINDOW_QUERIES})
    traits = frozenset({Trait.COMPARABLE})

    def score(self, view: LayerView) -> TokenScores:
        return TokenScores(view.need_per_token(Signal.LEARNED_SCORES) + relative_norms(view.values))


def relative_norms(values: Tensor) -> Tensor:
    """[num_kv_heads, num_tokens], float32: logarithms of distances to the head's mean value, as shares of their mean.

    ``values`` is [num_tokens, num_kv_heads, head_dim] of one layer, of any float dtype.
    """
    # A copy, because the mean is taken off in place.
    rows = values.to(torch.float32, copy=True)
    norms: Tensor = torch.linalg.vector_norm(rows.sub_(rows.mean(0)), dim=-1).clamp_min_(NORM_FLOOR)
    return (norms / norms.mean()).log_().T


class Distilled(BudgetOptions):
    """``distilled``."""

    name = "distilled"
    summary = "attention that learned weights predict, times the value's distance from the mean"
    source = "this project, after KVzap (arXiv 2601.07891)"
    use_when = "always: scores are learned once per model"

    budget_rule: BudgetRule = "all-layers"

    def build(self) -> Policy:
        return self.policy(DistilledScorer())
