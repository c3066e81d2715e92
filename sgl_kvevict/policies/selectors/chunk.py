"""Whole chunks of consecutive tokens (ChunkKV)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from sgl_kvevict.policies.parts import RangeScores, Trait
from sgl_kvevict.policies.ranking import fill_in_order


@dataclass(frozen=True)
class ChunkSelector:
    """Keeps the chunks with the highest summed scores, best first, until the budget is spent.

    Attributes:
        chunk_length: tokens in a chunk; the last one may be shorter.
        mode: "exact" lays chunks over the competing tokens and cuts the last accepted chunk to what is left
            of the budget. "paper" follows Algorithm 1 as printed: chunks also over window tokens inside the
            range, as many whole ones as the budget with the window holds, and room for the window made by dropping
            the *latest* selected tokens. A tail that covers the window would leave nothing of this.
        chunk_score: "sum" of the chunk's scores, or their "mean" (then a short last chunk is not at a
            disadvantage).
        share_heads: one list of chunks for all heads of a layer, by scores summed over heads (kvpress).

    Source: ChunkKV (arXiv 2502.00299), Alg. 1.
    Differs: Algorithm 1 can store window tokens twice and leaves ``budget mod chunk_length`` entries empty;
        here every token is stored once, and "paper" fills the gaps with the next best chunks. Its grid ends with the
        range: the tail's own scores are in no chunk.
    """

    chunk_length: int = 10
    mode: Literal["exact", "paper"] = "exact"
    chunk_score: Literal["sum", "mean"] = "sum"
    share_heads: bool = False
    requires: ClassVar[frozenset[Trait]] = frozenset()

    def select(self, scores: RangeScores, keep_lens: Tensor) -> Tensor:
        """Choose tokens; see :class:`Selector`."""
        if self.mode == "exact":
            values = scores.candidates(scores.values)
            free = torch.ones_like(values, dtype=torch.bool)
            return scores.with_pinned(self._take(free, self._ranking(values), keep_lens))
        return self._paper(scores, keep_lens + scores.num_last)

    def _paper(self, scores: RangeScores, budgets: Tensor) -> Tensor:
        """Algorithm 1 over all tokens but the pinned first ones; budgets include the window's tokens in the range."""
        values = scores.values[..., scores.num_first :]
        num_tokens, num_last = values.shape[-1], scores.num_last
        ranking = self._ranking(values)
        whole = (budgets + scores.num_behind).div(self.chunk_length, rounding_mode="floor").unsqueeze(-1)
        place = torch.empty_like(ranking).scatter_(
            -1, ranking, torch.arange(ranking.shape[-1], device=ranking.device).expand_as(ranking)
        )
        selected = (place < whole).repeat_interleave(self.chunk_length, dim=-1)[..., :num_tokens]
        kept = selected & (selected.cumsum(-1) <= (budgets - num_last).unsqueeze(-1))
        kept[..., num_tokens - num_last :] = True
        kept |= self._take(~kept, ranking, budgets - kept.sum(-1))
        return pad(kept, (scores.num_first, 0), value=True)

    def _ranking(self, values: Tensor) -> Tensor:
        """Chunk indices, best first, ties to the lower one: [num_layers, num_kv_heads, num_chunks], int64."""
        chunks = self._per_chunk(values.double())
        if self.chunk_score == "mean":
            chunks = chunks / self._per_chunk(torch.ones_like(values))
        if self.share_heads:
            chunks = chunks.sum(1, keepdim=True).expand_as(chunks)
        return chunks.sort(dim=-1, descending=True, stable=True).indices

    def _per_chunk(self, per_token: Tensor) -> Tensor:
        """Sum over each chunk: [num_layers, num_kv_heads, num_chunks]."""
        missing = -per_token.shape[-1] % self.chunk_length
        return pad(per_token, (0, missing)).view(*per_token.shape[:-1], -1, self.chunk_length).sum(-1)

    def _take(self, free: Tensor, ranking: Tensor, budgets: Tensor) -> Tensor:
        """Mark the first free tokens of the best chunks until each budget is spent."""
        sizes = self._per_chunk(free.long()).gather(-1, ranking)
        taken = fill_in_order(sizes, budgets.unsqueeze(-1))
        per_chunk = torch.empty_like(taken).scatter_(-1, ranking, taken)
        missing = -free.shape[-1] % self.chunk_length
        rank = pad(free, (0, missing)).view(*free.shape[:-1], -1, self.chunk_length).cumsum(-1)
        return free & (rank <= per_chunk.unsqueeze(-1)).flatten(-2)[..., : free.shape[-1]]
