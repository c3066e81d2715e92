"""Random scores: the control every method must beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from sgl_kvevict.policies.observation import LayerObservation, Signal
from sgl_kvevict.policies.parts import TokenScores, Trait


@dataclass(frozen=True)
class RandomScorer:
    """Uniform random numbers; the same seed, layer, start and length give the same scores on every device.

    Attributes:
        seed: of the generator.
    """

    seed: int = 0
    needs: ClassVar[frozenset[Signal]] = frozenset()
    traits: ClassVar[frozenset[Trait]] = frozenset({Trait.COMPARABLE})
    window_size: ClassVar[int] = 0
    kept_window: ClassVar[int] = 0

    def score(self, observation: LayerObservation) -> TokenScores:
        """Score one layer."""
        generator = torch.Generator().manual_seed(
            (self.seed * 1_000_003 + observation.layer) * 1_000_003 + observation.start
        )
        shape = (observation.num_kv_heads, observation.num_tokens)
        return TokenScores(torch.rand(shape, generator=generator).to(observation.token_slots.device, non_blocking=True))
