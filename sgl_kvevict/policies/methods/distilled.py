"""``distilled``: passes, and scores that ``sgl_kvevict/distill/`` learns from them; the default."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field

from sgl_kvevict.policies.layer_view import LayerView
from sgl_kvevict.policies.options import OneBudgetOptions
from sgl_kvevict.policies.parts import Scorer, TokenScores, Trait
from sgl_kvevict.policies.policy import Policy
from sgl_kvevict.policies.signals import Readers, Signal

WINDOW_SIZE = 8
"""Queries. 32 predict no better, and cost as much as all other features together."""


@dataclass(frozen=True)
class DistilledScorer(Scorer):
    """Learned scores; else reader attention; else echo attention (slots are short and nothing is learned yet).

    Where passes have read the range, learned scores are joined with what they measured
    (:func:`sgl_kvevict.distill.joint_scores`).
    With ``use_window`` the attention of the prompt's last ``WINDOW_SIZE`` queries is a feature of learned scores
    (:class:`sgl_kvevict.distill.ScoreWeights`).
    """

    use_window: bool
    traits = frozenset({Trait.COMPARABLE})

    @property
    def window_size(self) -> int:
        """Number of last queries of the prompt that the scorer reads."""
        return WINDOW_SIZE if self.use_window else 0

    @property
    def needs(self) -> frozenset[Signal]:
        """All three signals, keys, values, and window queries with ``use_window``."""
        window = {Signal.WINDOW_QUERIES} if self.use_window else set()
        scores = {Signal.LEARNED_SCORES, Signal.READER_ATTENTION, Signal.ECHO_ATTENTION}
        return frozenset({*scores, Signal.KEYS, Signal.VALUES, *window})

    def score(self, view: LayerView) -> TokenScores:
        """Score one layer by the first of the three signals that is present; ValueError if none is."""
        order = (Signal.LEARNED_SCORES, Signal.READER_ATTENTION, Signal.ECHO_ATTENTION)
        present = next((signal for signal in order if signal in view.signals), Signal.READER_ATTENTION)
        return TokenScores(view.need_per_token(present))


class Distilled(OneBudgetOptions):
    """``distilled``."""

    name = "distilled"
    summary = "scores learned from passes like those of reconstruction, with what passes over the prefix itself measure"
    source = "this project, after KVzap (arXiv 2601.07891)"
    use_when = "always: no pass is needed once something is learned"

    use_window: bool = Field(
        True, description="look at the attention of the prompt's last queries too, not at the cache alone"
    )

    def build(self) -> Policy:
        """Make the policy."""
        return self.policy(DistilledScorer(self.use_window), readers=Readers.REPETITION)
