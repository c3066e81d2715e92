"""``random``: the control that every policy must beat."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pydantic import Field

from sgl_kvevict.policies.layer_view import LayerView
from sgl_kvevict.policies.options import BudgetOptions
from sgl_kvevict.policies.parts import Scorer, TokenScores, Trait
from sgl_kvevict.policies.policy import Policy


@dataclass(frozen=True)
class RandomScorer(Scorer):
    """Uniform random numbers; the same seed, layer, start and length give the same scores on every device."""

    seed: int = 0
    traits = frozenset({Trait.COMPARABLE})

    def score(self, view: LayerView) -> TokenScores:
        """Score one layer."""
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + view.layer) * 1_000_003 + view.start)
        shape = (view.num_kv_heads, view.num_tokens)
        # Drawn on the CPU: a GPU's generator gives other numbers.
        return TokenScores(torch.rand(shape, generator=generator).to(view.token_slots.device, non_blocking=True))


class Random(BudgetOptions):
    """``random``."""

    name = "random"
    summary = "a random set: the control"
    source = "none"
    use_when = "the control of an experiment"

    seed: int = Field(0, ge=0, description="of the random numbers")

    def build(self) -> Policy:
        return self.policy(RandomScorer(self.seed))
