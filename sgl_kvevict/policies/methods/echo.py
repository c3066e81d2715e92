"""``echo``: what the prompt would attend to if it were read once more, without the forward pass that reads it.

Source: a scheme of this project, after KVzip's repetition (arXiv 2505.23416), Sec. 3. While a prompt is prefilled, a
token is seen by what happens to follow it, never by a question about it. Its own queries know better: moved behind the
keys, a token's query looks for what continues it, as it would if the model repeated the text. What is computed of that
during the prefill, ``kvevict_kernels/echo_attention/`` defines; the score is that number.
"""

from __future__ import annotations

from dataclasses import dataclass

from sgl_kvevict.policies.budget_options import OneBudgetOptions
from sgl_kvevict.policies.layer_view import LayerView
from sgl_kvevict.policies.method import Method
from sgl_kvevict.policies.parts import Scorer, TokenScores, Trait
from sgl_kvevict.policies.policy import Policy
from sgl_kvevict.policies.selectors import TopKSelector
from sgl_kvevict.policies.signals import Signal


@dataclass(frozen=True)
class EchoAttentionScorer(Scorer):
    """How much attention each token gets from the prompt's own queries, moved behind it."""

    needs = frozenset({Signal.ECHO_ATTENTION})
    traits = frozenset({Trait.COMPARABLE})

    def score(self, view: LayerView) -> TokenScores:
        """Score one layer."""
        return TokenScores(view.need_per_token(Signal.ECHO_ATTENTION))


def _build(options: OneBudgetOptions) -> Policy:
    return Policy("echo", EchoAttentionScorer(), options.allocator(), TopKSelector())


METHOD = Method(
    name="echo",
    summary="what the prompt would attend to if it were read once more, without reading it; one budget for all layers",
    source="this project, after KVzip",
    use_when="questions are unknown and a second reading costs too much",
    options_type=OneBudgetOptions,
    build=_build,
)
