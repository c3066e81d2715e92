"""A policy of your own: what the last queries fetch, which is attention times the size of the value."""

from dataclasses import dataclass

from sgl_kvevict.policies import LayerView, Policy, Scorer, Signal, TokenScores, Trait
from sgl_kvevict.policies.budgets import AdaptiveHeads, LayeredBudget, UniformLayers
from sgl_kvevict.policies.scorers import WindowAttentionScorer
from sgl_kvevict.policies.selectors import TopKSelector


@dataclass(frozen=True)
class ValueAwareScorer(Scorer):
    """Mean attention of the prompt's last queries, times the norm of the value they get for it."""

    window_size: int = 32
    needs = frozenset({Signal.WINDOW_QUERIES, Signal.KEYS, Signal.VALUES})
    traits = frozenset({Trait.COMPARABLE})

    def score(self, view: LayerView) -> TokenScores:
        """One number per KV head and token of a layer; higher is kept."""
        attention = WindowAttentionScorer(self.window_size).score(view).values
        return TokenScores(attention * view.values.float().norm(dim=-1).T)


def value_aware(window_size: int = 32) -> Policy:
    """The factory that the server calls with ``policy_options``."""
    budget = LayeredBudget(UniformLayers(), AdaptiveHeads())
    return Policy("value-aware", ValueAwareScorer(window_size), budget, TopKSelector())
