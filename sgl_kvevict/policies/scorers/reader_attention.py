"""The attention that readers paid: the score of context reconstruction and of sample questions."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_kvevict.policies.layer_view import LayerView
from sgl_kvevict.policies.parts import Scorer, TokenScores, Trait
from sgl_kvevict.policies.signals import Signal


@dataclass(frozen=True)
class ReaderAttentionScorer(Scorer):
    """How much attention each token got from all queries of its readers, by the root of the summed squares.

    Squares, not the sum: a token that one question out of a hundred needs is nearly as dear as one that all need. Not
    the maximum either, which is as high for a token that one query happened to look at as for one that many did.

    Source: KVzip (arXiv 2505.23416), Sec. 3, Eq. 3.
    Differs: the 2-norm over queries and the query heads of a group instead of the maximum, which loses more answers
        at small budgets (docs/quality.md); attention weights over everything the query sees, instead of a softmax over
        one chunk's keys; a chunk's queries score the whole prefix, not only their own chunk.
    """

    needs = frozenset({Signal.READER_ATTENTION})
    traits = frozenset({Trait.COMPARABLE})

    def score(self, view: LayerView) -> TokenScores:
        """Score one layer."""
        return TokenScores(view.need_per_token(Signal.READER_ATTENTION))
