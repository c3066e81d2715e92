"""Keys unlike the average key are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn.functional import normalize

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
        directions = normalize(observation.keys.float(), dim=-1)
        anchor = normalize(directions.mean(0), dim=-1)
        return TokenScores(-torch.einsum("nhd,hd->hn", directions, anchor))
