"""``knorm``: keys with a small norm are kept. Serve it as ``knorm:knorm``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sgl_kvevict.policies import LayerView, Policy, Scorer, Signal, TokenScores
from sgl_kvevict.policies.options import BudgetOptions


@dataclass(frozen=True)
class KeyNormScorer(Scorer):
    """The negative L2 norm of the key; not comparable across heads, whose keys differ in scale.

    Source: Devoto et al. (arXiv 2406.11430), Sec. 3.
    Differs: all layers are compressed; the paper leaves the first two uncompressed in some runs.
    """

    needs = frozenset({Signal.KEYS})

    def score(self, view: LayerView) -> TokenScores:
        """Score one layer."""
        return TokenScores(-view.keys.float().norm(dim=-1).T)


class KNorm(BudgetOptions):
    """The options: those of every policy with a name."""

    name = "knorm"
    summary = "keys with the smallest norm"
    source = "Devoto et al. (arXiv 2406.11430), Sec. 3"
    use_when = "a peer; the cheapest that looks at content"

    def build(self) -> Policy:
        """Make the policy."""
        return self.policy(KeyNormScorer())


def knorm(**options: Any) -> Policy:
    """The factory that the server calls with ``policy_options``; ConfigError names an option that does not fit."""
    return KNorm.parse(options).build()
