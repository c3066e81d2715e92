"""``streaming-llm``: the first tokens (sinks) and the most recent ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field

from sgl_kvevict.policies.layer_view import LayerView
from sgl_kvevict.policies.options import BudgetOptions
from sgl_kvevict.policies.parts import Scorer, TokenScores
from sgl_kvevict.policies.policy import Policy

NumSinkTokens = Annotated[int, Field(ge=0, description="first tokens of a path that every head keeps")]


@dataclass(frozen=True)
class PositionScorer(Scorer):
    """The token's index in the range, in every head and layer.

    Source: StreamingLLM (arXiv 2309.17453), Sec. 3; the sinks are the policy's ``num_sink_tokens``.
    Differs: positions stay absolute (StreamingLLM renumbers them inside its cache).
    """

    def score(self, view: LayerView) -> TokenScores:
        """Score one layer."""
        index = torch.arange(view.num_tokens, dtype=torch.float32, device=view.token_slots.device)
        return TokenScores(index.expand(view.num_kv_heads, -1))


class StreamingLLM(BudgetOptions):
    """``streaming-llm``."""

    name = "streaming-llm"
    summary = "first (sink) tokens and the most recent ones, the same in every head"
    source = "StreamingLLM (arXiv 2309.17453), Sec. 3"
    use_when = "a cheap baseline; chats where only the end counts"

    num_sink_tokens: NumSinkTokens = 4

    def build(self) -> Policy:
        return self.policy(PositionScorer(), num_sink_tokens=self.num_sink_tokens)
