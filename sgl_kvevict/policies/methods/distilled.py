"""``distilled``: predicts the entries of ``reconstruction``, by scores learned from its passes; the default.

Source: this project, after KVzap (arXiv 2601.07891). ``sgl_kvevict/distill/`` learns and predicts the scores.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field

from sgl_kvevict.policies.layer_view import LayerView
from sgl_kvevict.policies.options import OneBudgetOptions
from sgl_kvevict.policies.parts import Scorer, TokenScores, Trait
from sgl_kvevict.policies.policy import Policy
from sgl_kvevict.policies.selectors import TopKSelector
from sgl_kvevict.policies.signals import Readers, Signal

WINDOW_SIZE = 8
"""Queries (tokens). 32 predict no better and cost as much as everything else together."""


@dataclass(frozen=True)
class DistilledScorer(Scorer):
    """Learned scores; else the attention that readers paid; else echo attention (slots short, nothing learned yet).

    Each of the three is on one scale for all layers and heads.

    Attributes:
        use_window: learned scores also look at the attention of the prompt's last ``WINDOW_SIZE`` queries.

    Source: KVzap (arXiv 2601.07891), the idea; see :class:`sgl_kvevict.distill.ScoreWeights`.
    """

    use_window: bool
    traits = frozenset({Trait.COMPARABLE})

    @property
    def window_size(self) -> int:
        """Queries to keep."""
        return WINDOW_SIZE if self.use_window else 0

    @property
    def needs(self) -> frozenset[Signal]:
        """Window queries only if it looks at them."""
        window = {Signal.WINDOW_QUERIES} if self.use_window else set()
        scores = {Signal.LEARNED_SCORES, Signal.READER_ATTENTION, Signal.ECHO_ATTENTION}
        return frozenset({*scores, Signal.KEYS, Signal.VALUES, *window})

    def score(self, view: LayerView) -> TokenScores:
        """Score one layer by the first of the three signals that is present; ValueError without any."""
        order = (Signal.LEARNED_SCORES, Signal.READER_ATTENTION, Signal.ECHO_ATTENTION)
        present = next((signal for signal in order if signal in view.signals), Signal.READER_ATTENTION)
        return TokenScores(view.need_per_token(present))


class Distilled(OneBudgetOptions):
    """``distilled``."""

    name = "distilled"
    summary = "the entries of reconstruction, predicted by scores learned from its passes; at first, exactly those"
    source = "this project, after KVzap (arXiv 2601.07891)"
    use_when = "always: no pass once something is learned"

    use_window: bool = Field(
        True, description="look at the attention of the prompt's last queries too, not at the cache alone"
    )

    def build(self) -> Policy:
        """Make the policy."""
        scorer = DistilledScorer(self.use_window)
        return Policy(self.name, scorer, self.allocator(), TopKSelector(), readers=Readers.REPETITION)
