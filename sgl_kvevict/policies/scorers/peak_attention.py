"""The largest attention that any reader paid: the score of context reconstruction and of sample questions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sgl_kvevict.policies.observation import LayerObservation, Signal
from sgl_kvevict.policies.parts import TokenScores, Trait


@dataclass(frozen=True)
class PeakAttentionScorer:
    """How much attention each token got from the query that needed it most.

    The maximum, not the mean: a token that one question out of a hundred needs is as dear as one that all need.

    Source: KVzip (arXiv 2505.23416), Sec. 3, Eq. 3.
    Differs: attention weights over everything the query sees, instead of a softmax over one chunk's keys; a chunk's
        queries score the whole prefix, not only their own chunk.
    """

    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.PEAK_ATTENTION})
    traits: ClassVar[frozenset[Trait]] = frozenset({Trait.COMPARABLE})
    window_size: ClassVar[int] = 0
    kept_window: ClassVar[int] = 0

    def score(self, observation: LayerObservation) -> TokenScores:
        """Score one layer.

        Raises:
            ValueError: the observation has no peak attention.
        """
        return TokenScores(observation.require_peaks(type(self).__name__))
