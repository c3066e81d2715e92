"""Keys unlike the average key are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.nn.functional import cosine_similarity, normalize

from sgl_kvevict.policies.observation import LayerObservation, Signal
from sgl_kvevict.policies.parts import TokenScores, Trait


@dataclass(frozen=True)
class KeyDifferenceScorer:
    """The negative cosine similarity to the mean direction of the range's keys. Question-agnostic and cheap.

    Source: KeyDiff (arXiv 2504.15364), Sec. 4.
    Differs: the mean is over the range to compress, not over the whole prompt.
    """

    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.KEYS})
    traits: ClassVar[frozenset[Trait]] = frozenset({Trait.COMPARABLE})
    window_size: ClassVar[int] = 0
    kept_window: ClassVar[int] = 0

    def score(self, observation: LayerObservation) -> TokenScores:
        """Score one layer."""
        keys = observation.keys.float()
        anchor = normalize(keys, dim=-1).mean(0, keepdim=True)
        return TokenScores(-cosine_similarity(keys, anchor, dim=-1).T)
