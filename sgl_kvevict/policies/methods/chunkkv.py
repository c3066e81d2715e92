"""``chunkkv``: whole chunks of consecutive tokens, by the attention that the last queries pay them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import pad

from sgl_kvevict.policies.methods.snapkv import WindowSize
from sgl_kvevict.policies.options import BudgetOptions
from sgl_kvevict.policies.parts import RangeScores, Selector
from sgl_kvevict.policies.policy import Policy
from sgl_kvevict.policies.ranking import fill_in_order
from sgl_kvevict.policies.scorers import WindowAttentionScorer


@dataclass(frozen=True)
class ChunkSelector(Selector):
    """Keeps the chunks with the highest summed scores, best first, until the budget is spent.

    Chunks are of the competing tokens, the last accepted one cut to the budget. The "mean" as ``chunk_score`` does not
    penalise a short last chunk.

    Source: ChunkKV (arXiv 2502.00299), Alg. 1.
    Differs: Algorithm 1 lays chunks over the window too, can store its tokens twice, and leaves ``budget mod
        chunk_length`` entries empty; here every token is stored once, and the next best chunks fill the budget. Tokens
        that every head keeps are in no chunk.
    """

    options: ChunkKV

    def select(self, scores: RangeScores, keep_lens: Tensor) -> Tensor:
        """Choose tokens; see :class:`Selector`."""
        values = scores.candidates(scores.values)
        return scores.with_pinned(self._take(values.shape[-1], self._ranking(values), keep_lens))

    def _ranking(self, values: Tensor) -> Tensor:
        """Chunk indices, best first, ties to the lower one: [num_layers, num_kv_heads, num_chunks], int64."""
        # float64, so that rounding does not decide between chunks of equal scores.
        chunks = self._per_chunk(values.double())
        if self.options.chunk_score == "mean":
            chunks = chunks / self._per_chunk(torch.ones_like(values))
        if self.options.share_heads:
            chunks = chunks.sum(1, keepdim=True).expand_as(chunks)
        return chunks.sort(dim=-1, descending=True, stable=True).indices

    def _per_chunk(self, per_token: Tensor) -> Tensor:
        """Sum over each chunk: [num_layers, num_kv_heads, num_chunks]."""
        missing = -per_token.shape[-1] % self.options.chunk_length
        return pad(per_token, (0, missing)).view(*per_token.shape[:-1], -1, self.options.chunk_length).sum(-1)

    def _take(self, num_tokens: int, ranking: Tensor, budgets: Tensor) -> Tensor:
        """Mark the first tokens of the best chunks until each budget is spent."""
        length, num_chunks = self.options.chunk_length, ranking.shape[-1]
        starts = torch.arange(num_chunks, device=ranking.device) * length
        sizes = (num_tokens - starts).clamp(max=length).expand_as(ranking).gather(-1, ranking)
        taken = fill_in_order(sizes, budgets.unsqueeze(-1))
        per_chunk = torch.empty_like(taken).scatter_(-1, ranking, taken)
        place = torch.arange(length, device=ranking.device)
        return (place < per_chunk.unsqueeze(-1)).flatten(-2)[..., :num_tokens]


class ChunkKV(BudgetOptions):
    """``chunkkv``."""

    name = "chunkkv"
    summary = "whole chunks of consecutive tokens, by the attention the last queries pay to them"
    source = "ChunkKV (arXiv 2502.00299), Alg. 1, Sec. 3.3"
    use_when = "text whose sentences should stay whole"

    chunk_length: int = Field(10, ge=1, description="tokens in a chunk")
    reuse_layers: int = Field(
        1, ge=1, description="layers that share the positions chosen by the first of them; 1 = off"
    )
    window_size: WindowSize = 32
    chunk_score: Literal["sum", "mean"] = Field(
        "sum", description="a chunk's score is the sum or the mean of its tokens'"
    )
    share_heads: bool = Field(
        False, description="all heads of a layer keep the same chunks, by summed scores (kvpress)"
    )
    keep_window: bool = Field(True, description="window tokens inside the range are kept without competing")

    def build(self) -> Policy:
        """Make the policy."""
        scorer = WindowAttentionScorer(self.window_size, kernel_size=1, keep_window=self.keep_window)
        return self.policy(scorer, ChunkSelector(self), reuse_layers=self.reuse_layers)
