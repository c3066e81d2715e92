"""``keydiff``: keys unlike the average key are kept. Serve it as ``keydiff:keydiff``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import normalize

from sgl_kvevict.policies import LayerView, Policy, Scorer, Signal, TokenScores, Trait
from sgl_kvevict.policies.options import BudgetOptions


@dataclass(frozen=True)
class KeyDifferenceScorer(Scorer):
    """The negative cosine similarity to the mean direction of the range's keys.

    Source: KeyDiff (arXiv 2504.15364), Sec. 4.
    Differs: the mean is over the range to compress, not over the whole prompt.
    """

    needs = frozenset({Signal.KEYS})
    traits = frozenset({Trait.COMPARABLE})

    def score(self, view: LayerView) -> TokenScores:
        """Score one layer."""
        directions = normalize(view.keys.float(), dim=-1)
        anchor = normalize(directions.mean(0), dim=-1)
        return TokenScores(-torch.einsum("nhd,hd->hn", directions, anchor))


class KeyDiff(BudgetOptions):
    """The options: those of every policy with a name."""

    name = "keydiff"
    summary = "keys least like the average key"
    source = "KeyDiff (arXiv 2504.15364), Sec. 4"
    use_when = "a peer; varied tokens, no queries needed"

    def build(self) -> Policy:
        """Make the policy."""
        return self.policy(KeyDifferenceScorer())


def keydiff(**options: Any) -> Policy:
    """The factory that the server calls with ``policy_options``; ConfigError names an option that does not fit."""
    return KeyDiff.parse(options).build()
