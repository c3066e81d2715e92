"""``distilled``: what ``reconstruction`` would keep, as learned from its passes; the default.

Source: this project, after KVzap (arXiv 2601.07891). What is learned, and from what: ``sgl_kvevict/distill/``.
"""

from __future__ import annotations

from dataclasses import dataclass

from sgl_kvevict.policies.budget_options import OneBudgetOptions
from sgl_kvevict.policies.layer_view import LayerView
from sgl_kvevict.policies.method import Method
from sgl_kvevict.policies.options import option
from sgl_kvevict.policies.parts import Scorer, TokenScores, Trait
from sgl_kvevict.policies.policy import Policy
from sgl_kvevict.policies.selectors import TopKSelector
from sgl_kvevict.policies.signals import Readers, Signal

WINDOW_SIZE = 8
"""Queries (tokens). 32 tell no more and cost as much as everything else together."""


@dataclass(frozen=True)
class DistilledScorer(Scorer):
    """What a token's key and value tell of the attention that readers would pay it; where readers came, what they paid.

    Where neither is there (slots are short, and nothing is learned yet) echo attention has to do. Each of the three is
    on one scale for all layers and heads.

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
        needs = frozenset(
            {Signal.LEARNED_SCORES, Signal.READER_ATTENTION, Signal.ECHO_ATTENTION, Signal.KEYS, Signal.VALUES}
        )
        return needs | ({Signal.WINDOW_QUERIES} if self.use_window else frozenset())

    def score(self, view: LayerView) -> TokenScores:
        """Score one layer by the first of the three that is there; without any of them, a ValueError."""
        order = (Signal.LEARNED_SCORES, Signal.READER_ATTENTION, Signal.ECHO_ATTENTION)
        there = next((signal for signal in order if signal in view.signals), Signal.READER_ATTENTION)
        return TokenScores(view.need_per_token(there))


@dataclass(frozen=True)
class DistilledOptions(OneBudgetOptions):
    """Options of ``distilled``."""

    use_window: bool = option(True, "look at the attention of the prompt's last queries too, not at the cache alone")


def _build(options: DistilledOptions) -> Policy:
    scorer = DistilledScorer(options.use_window)
    return Policy("distilled", scorer, options.allocator(), TopKSelector(), readers=Readers.REPETITION)


METHOD = Method(
    name="distilled",
    summary="what reconstruction would keep, as learned from its passes; while nothing is learned, what they keep",
    source="this project, after KVzap (arXiv 2601.07891)",
    use_when="always: no pass once something is learned",
    options_type=DistilledOptions,
    build=_build,
)
