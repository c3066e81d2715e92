"""Recency as score: what StreamingLLM keeps besides its sinks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from sgl_kvevict.policies.observation import LayerObservation, Signal
from sgl_kvevict.policies.parts import TokenScores, Trait


@dataclass(frozen=True)
class PositionScorer:
    """Later tokens score higher, the same in every head and layer.

    Source: StreamingLLM (arXiv 2309.17453), Sec. 3; the sinks are the policy's ``num_sink_tokens``.
    Differs: positions stay absolute (StreamingLLM renumbers them inside its cache).
    """

    needs: ClassVar[frozenset[Signal]] = frozenset()
    traits: ClassVar[frozenset[Trait]] = frozenset()
    window_size: ClassVar[int] = 0
    kept_window: ClassVar[int] = 0

    def score(self, observation: LayerObservation) -> TokenScores:
        """Score one layer: the token's index in the range."""
        index = torch.arange(observation.num_tokens, dtype=torch.float32, device=observation.token_slots.device)
        return TokenScores(index.expand(observation.num_kv_heads, -1))
