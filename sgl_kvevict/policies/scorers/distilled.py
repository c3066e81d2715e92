"""Learned scores, those of the passes that they are learned from, or what does before: the score of ``distilled``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sgl_kvevict.policies.observation import LayerObservation, Signal
from sgl_kvevict.policies.parts import TokenScores, Trait

WINDOW_SIZE = 8
"""Queries (tokens). 32 tell no more and cost as much as everything else together."""


@dataclass(frozen=True)
class DistilledScorer:
    """What a token's key and value tell of the attention that readers would pay it; where readers came, what they paid.

    Where neither is there (slots are short, and nothing is learned yet) echo attention has to do. Each of the three is
    on one scale for all layers and heads.

    Attributes:
        use_window: learned scores also look at the attention of the prompt's last ``WINDOW_SIZE`` queries.

    Source: KVzap (arXiv 2601.07891), the idea; see :class:`sgl_kvevict.distill.ScoreWeights`.
    """

    use_window: bool
    traits: ClassVar[frozenset[Trait]] = frozenset({Trait.COMPARABLE})
    kept_window: ClassVar[int] = 0

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

    def score(self, observation: LayerObservation) -> TokenScores:
        """Score one layer.

        Raises:
            ValueError: the observation has none of the three.
        """
        if observation.learned is not None:
            return TokenScores(observation.learned)
        if observation.reader_attention is None and observation.echo is not None:
            return TokenScores(observation.require_echo(type(self).__name__))
        return TokenScores(observation.require_reader_attention(type(self).__name__))
