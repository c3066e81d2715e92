"""``chunkkv``: whole chunks of consecutive tokens, by the attention that the last queries pay them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import pad

from sgl_kvevict.errors import ConfigError
from sgl_kvevict.policies.layer_view import LayerView
from sgl_kvevict.policies.methods.snapkv import WindowSize
from sgl_kvevict.policies.options import BudgetOptions, PaperSettings, PaperValue
from sgl_kvevict.policies.parts import RangeScores, Scorer, Selector, TokenScores
from sgl_kvevict.policies.policy import Policy
from sgl_kvevict.policies.ranking import fill_in_order
from sgl_kvevict.policies.scorers import WindowAttentionScorer
from sgl_kvevict.policies.signals import Signal


@dataclass(frozen=True)
class WindowLogitsScorer(Scorer):
    """Sum over the window of ``q . k``, without scale, mask or softmax; for comparison only.

    Logits can be negative, which penalises long chunks.

    Source: ChunkKV (arXiv 2502.00299), Alg. 1, line 1, taken literally.
    Differs: with grouped queries, the mean over a group.
    """

    window_size: int = 32
    keep_window: bool = True
    needs = frozenset({Signal.WINDOW_QUERIES, Signal.KEYS})

    @property
    def kept_window(self) -> int:
        """The whole window, or nothing."""
        return self.window_size if self.keep_window else 0

    def score(self, view: LayerView) -> TokenScores:
        """Score one layer."""
        window = view.need_window().last(self.window_size)
        keys = view.keys.float().permute(1, 2, 0)  # [H, D, N]
        grouped = window.queries.float().sum(0).view(view.num_kv_heads, -1, keys.shape[1])
        return TokenScores((grouped.mean(1, keepdim=True) @ keys).squeeze(1))


@dataclass(frozen=True)
class ChunkSelector(Selector):
    """Keeps the chunks with the highest summed scores, best first, until the budget is spent.

    With ``mode`` "exact", chunks are of the competing tokens, the last accepted one cut to the budget. "paper"
    (Algorithm 1): chunks also of window tokens inside the range, as many whole ones as budget and window hold; then the
    *latest* selected tokens make room for the window. With a tail that covers the window both agree. The "mean" as
    ``chunk_score`` does not penalise a short last chunk.

    Source: ChunkKV (arXiv 2502.00299), Alg. 1.
    Differs: Algorithm 1 can store window tokens twice and leaves ``budget mod chunk_length`` entries empty; here every
        token is stored once, and "paper" fills the gaps with the next best chunks. The tail's scores are in no chunk.
    """

    options: ChunkKV

    def select(self, scores: RangeScores, keep_lens: Tensor) -> Tensor:
        """Choose tokens; see :class:`Selector`."""
        if self.options.mode == "exact":
            values = scores.candidates(scores.values)
            free = torch.ones_like(values, dtype=torch.bool)
            return scores.with_pinned(self._take(free, self._ranking(values), keep_lens))
        return self._paper(scores, keep_lens + scores.num_last)

    def _paper(self, scores: RangeScores, budgets: Tensor) -> Tensor:
        """Algorithm 1 without the pinned first tokens; budgets include the window's tokens in the range."""
        values = scores.values[..., scores.num_first :]
        num_tokens, num_last = values.shape[-1], scores.num_last
        ranking = self._ranking(values)
        whole = (budgets + scores.num_behind).div(self.options.chunk_length, rounding_mode="floor").unsqueeze(-1)
        place = torch.empty_like(ranking).scatter_(
            -1, ranking, torch.arange(ranking.shape[-1], device=ranking.device).expand_as(ranking)
        )
        selected = (place < whole).repeat_interleave(self.options.chunk_length, dim=-1)[..., :num_tokens]
        kept = selected & (selected.cumsum(-1) <= (budgets - num_last).unsqueeze(-1))
        kept[..., num_tokens - num_last :] = True
        kept |= self._take(~kept, ranking, budgets - kept.sum(-1))
        return pad(kept, (scores.num_first, 0), value=True)

    def _ranking(self, values: Tensor) -> Tensor:
        """Chunk indices, best first, ties to the lower one: [num_layers, num_kv_heads, num_chunks], int64."""
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

    def _take(self, free: Tensor, ranking: Tensor, budgets: Tensor) -> Tensor:
        """Mark the first free tokens of the best chunks until each budget is spent."""
        sizes = self._per_chunk(free.long()).gather(-1, ranking)
        taken = fill_in_order(sizes, budgets.unsqueeze(-1))
        per_chunk = torch.empty_like(taken).scatter_(-1, ranking, taken)
        missing = -free.shape[-1] % self.options.chunk_length
        rank = pad(free, (0, missing)).view(*free.shape[:-1], -1, self.options.chunk_length).cumsum(-1)
        return free & (rank <= per_chunk.unsqueeze(-1)).flatten(-2)[..., : free.shape[-1]]


class ChunkKV(BudgetOptions):
    """``chunkkv``."""

    name = "chunkkv"
    summary = "whole chunks of consecutive tokens, by the attention the last queries pay to them"
    source = "ChunkKV (arXiv 2502.00299), Alg. 1, Sec. 3.3"
    use_when = "text whose sentences should stay whole"
    paper = PaperSettings(
        "ChunkKV (arXiv 2502.00299)",
        (
            PaperValue("chunk_length", 10, "experiments: 10 for all models"),
            PaperValue("mode", "paper", "Alg. 1, lines 2-8"),
            PaperValue("window_size", 32, "the largest of {4, 8, 16, 32}; which one was used is not said"),
            PaperValue("score", "softmax", "text on Alg. 1: as H2O and SnapKV; line 1 alone would be raw"),
            PaperValue("chunk_score", "sum", "Alg. 1, line 3"),
            PaperValue("share_heads", False, "Alg. 1, for one head"),
        ),
        why_tail="Alg. 1, line 2: chunks lie over the window's tokens too",
    )

    chunk_length: int = Field(10, ge=1, description="tokens in a chunk")
    mode: Literal["exact", "paper"] = Field(
        "exact",
        description="chunks over competing tokens, the last one cut to fit (exact), or Algorithm 1 as printed (paper), "
        "which needs tail_tokens < window_size",
    )
    reuse_layers: int = Field(
        1, ge=1, description="layers that share the positions chosen by the first of them; 1 = off"
    )
    window_size: WindowSize = 32
    score: Literal["softmax", "raw"] = Field(
        "softmax", description="attention weights, or raw dot products (as printed)"
    )
    chunk_score: Literal["sum", "mean"] = Field(
        "sum", description="a chunk's score is the sum or the mean of its tokens'"
    )
    share_heads: bool = Field(
        False, description="all heads of a layer keep the same chunks, by summed scores (kvpress)"
    )
    keep_window: bool = Field(True, description="window tokens inside the range are kept without competing")

    def build(self) -> Policy:
        """Make the policy."""
        if self.mode == "paper" and not self.keep_window:
            raise ConfigError(
                "policy_options.mode: got 'paper' for policy 'chunkkv' with keep_window=False; allowed: 'exact', or "
                "keep_window=True (Algorithm 1 always keeps the window)"
            )
        scorer: Scorer = WindowAttentionScorer(self.window_size, kernel_size=1, keep_window=self.keep_window)
        if self.score == "raw":
            scorer = WindowLogitsScorer(self.window_size, self.keep_window)
        return self.policy(
            scorer,
            ChunkSelector(self),
            reuse_layers=self.reuse_layers,
            max_tail_tokens=self.window_size - 1 if self.mode == "paper" else None,
            why_max_tail=f"mode='paper' lays chunks over the window's window_size={self.window_size} tokens too; a "
            "tail that covers all of them leaves what mode='exact' keeps",
        )
