"""``random``: the control every method must beat."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sgl_kvevict.policies.budget_options import BudgetOptions
from sgl_kvevict.policies.layer_view import LayerView
from sgl_kvevict.policies.method import Method
from sgl_kvevict.policies.options import option
from sgl_kvevict.policies.parts import Scorer, TokenScores, Trait
from sgl_kvevict.policies.policy import Policy
from sgl_kvevict.policies.selectors import TopKSelector


@dataclass(frozen=True)
class RandomScorer(Scorer):
    """Uniform random numbers; the same seed, layer, start and length give the same scores on every device.

    Attributes:
        seed: of the generator.
    """

    seed: int = 0
    traits = frozenset({Trait.COMPARABLE})

    def score(self, view: LayerView) -> TokenScores:
        """Score one layer."""
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + view.layer) * 1_000_003 + view.start)
        shape = (view.num_kv_heads, view.num_tokens)
        return TokenScores(torch.rand(shape, generator=generator).to(view.token_slots.device, non_blocking=True))


@dataclass(frozen=True)
class RandomOptions(BudgetOptions):
    """Options of ``random``."""

    seed: int = option(0, "of the random numbers", minimum=0)


def _build(options: RandomOptions) -> Policy:
    return Policy("random", RandomScorer(options.seed), options.allocator(), TopKSelector())


METHOD = Method(
    name="random",
    summary="a random set: the control",
    source="none",
    use_when="the control of an experiment",
    options_type=RandomOptions,
    build=_build,
)
