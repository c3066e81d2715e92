"""Keys with a small norm are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sgl_kvevict.policies.observation import LayerObservation, Signal
from sgl_kvevict.policies.parts import TokenScores, Trait


@dataclass(frozen=True)
class KeyNormScorer:
    """The negative L2 norm of the key: small keys attract attention. Question-agnostic and cheap.

    Heads differ in the scale of their keys, so scores are not comparable across heads.

    Source: Devoto et al. (arXiv 2406.11430), Sec. 3.
    Differs: no (the paper leaves the first two layers uncompressed in some runs; here all are).
    """

    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.KEYS})
    traits: ClassVar[frozenset[Trait]] = frozenset()
    window_size: ClassVar[int] = 0
    kept_window: ClassVar[int] = 0

    def score(self, observation: LayerObservation) -> TokenScores:
        """Score one layer."""
        return TokenScores(-observation.keys.float().norm(dim=-1).T)
