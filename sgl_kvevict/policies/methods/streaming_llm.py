"""``streaming-llm``: sinks and recent tokens.

Source: StreamingLLM (arXiv 2309.17453), Sec. 3.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sgl_kvevict.policies.budget_options import BudgetOptions
from sgl_kvevict.policies.layer_view import LayerView
from sgl_kvevict.policies.method import Method, PaperSettings, PaperValue
from sgl_kvevict.policies.options import option
from sgl_kvevict.policies.parts import Scorer, TokenScores
from sgl_kvevict.policies.policy import Policy
from sgl_kvevict.policies.selectors import TopKSelector


@dataclass(frozen=True)
class PositionScorer(Scorer):
    """Later tokens score higher, the same in every head and layer.

    Source: StreamingLLM (arXiv 2309.17453), Sec. 3; the sinks are the policy's ``num_sink_tokens``.
    Differs: positions stay absolute (StreamingLLM renumbers them inside its cache).
    """

    def score(self, view: LayerView) -> TokenScores:
        """Score one layer: the token's index in the range."""
        index = torch.arange(view.num_tokens, dtype=torch.float32, device=view.token_slots.device)
        return TokenScores(index.expand(view.num_kv_heads, -1))


@dataclass(frozen=True)
class StreamingOptions(BudgetOptions):
    """Options of ``streaming-llm``."""

    num_sink_tokens: int = option(4, "first tokens of a path that every head keeps", minimum=0)


def _build(options: StreamingOptions) -> Policy:
    sinks = options.num_sink_tokens
    return Policy("streaming-llm", PositionScorer(), options.allocator(), TopKSelector(), num_sink_tokens=sinks)


METHOD = Method(
    name="streaming-llm",
    summary="first (sink) tokens and the most recent ones, the same in every head",
    source="StreamingLLM (arXiv 2309.17453), Sec. 3",
    use_when="a cheap baseline; chats where only the end counts",
    options_type=StreamingOptions,
    build=_build,
    paper=PaperSettings("StreamingLLM (arXiv 2309.17453)", (PaperValue("num_sink_tokens", 4, "Sec. 3"),)),
)
