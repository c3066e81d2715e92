"""Attention that the prompt would pay itself, read once more: the score of ``echo``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sgl_kvevict.policies.observation import LayerObservation, Signal
from sgl_kvevict.policies.parts import TokenScores, Trait


@dataclass(frozen=True)
class EchoAttentionScorer:
    """How much attention each token gets from the prompt's own queries, moved behind it.

    Source: a scheme of this project, see :func:`sgl_kvevict.policies.echo.echo_attention`.
    """

    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.ECHO_ATTENTION})
    traits: ClassVar[frozenset[Trait]] = frozenset({Trait.COMPARABLE})
    window_size: ClassVar[int] = 0
    kept_window: ClassVar[int] = 0

    def score(self, observation: LayerObservation) -> TokenScores:
        """Score one layer.

        Raises:
            ValueError: the observation has no echo attention.
        """
        return TokenScores(observation.require_echo(type(self).__name__))
