"""Attention summed over all queries: the score of H2O and D2O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from sgl_kvevict.policies.layer_view import LayerView
from sgl_kvevict.policies.parts import Scorer, TokenScores, Trait
from sgl_kvevict.policies.signals import Signal


@dataclass(frozen=True)
class AccumulatedAttentionScorer(Scorer):
    """How much attention each token has received from all queries so far.

    The sums come from the forward pass, which makes them block by block. They favour early tokens, because
    more queries see them; ``normalize="queries"`` divides by the number of queries that could.

    Attributes:
        normalize: "none" (H2O, D2O) or "queries" (mean attention, as in kvpress' ObservedAttention and RoCo).

    Source: H2O (arXiv 2306.14048), Sec. 4; D2O, Eq. 6.
    Differs: evaluated once, when a range is compressed, not at every decode step. With grouped queries, the
        mean over a group. Tokens left from an earlier turn count the queries of the observed prompt only.
    """

    normalize: Literal["none", "queries"] = "none"
    needs = frozenset({Signal.ACCUMULATED_ATTENTION})

    @property
    def traits(self) -> frozenset[Trait]:
        """Plain sums also measure a layer's density."""
        sums = frozenset({Trait.ATTENTION_SUMS}) if self.normalize == "none" else frozenset()
        return sums | {Trait.COMPARABLE}

    def score(self, view: LayerView) -> TokenScores:
        """Score one layer; without a prompt length to normalise by, a ValueError."""
        sums = view.need_per_token(Signal.ACCUMULATED_ATTENTION)
        if self.normalize == "none":
            return TokenScores(sums)
        seen_by = view.need_prompt_length() - view.start
        queries = torch.arange(seen_by, seen_by - view.num_tokens, -1, device=sums.device)
        return TokenScores(sums / queries)
