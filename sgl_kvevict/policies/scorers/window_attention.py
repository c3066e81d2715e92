"""Attention that the prompt's last queries pay to each token: the score of SnapKV and its relatives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvevict_kernels.key_scores import window_scores
from sgl_kvevict.policies.layer_view import LayerView
from sgl_kvevict.policies.parts import Scorer, TokenScores, Trait
from sgl_kvevict.policies.signals import Signal


@dataclass(frozen=True)
class WindowAttentionScorer(Scorer):
    """Mean attention of the last ``window_size`` queries, smoothed by a pool along the tokens.

    The softmax runs over everything a query saw, not only over the range, so scores are true attention
    weights. Under grouped-query attention a KV head's score is the mean over its query heads. The unpooled
    mean breaks ties, because a max pool makes plateaus on which the peak itself could otherwise be evicted.

    Attributes:
        window_size: queries in the observation window.
        kernel_size: width of the pool, odd; 1 = no pool.
        pooling: "max" or "avg".
        order: "pool-mean" pools each query's row, then averages; "mean-pool" averages first.
        keep_window: tokens of the window that lie inside the range are kept in every head without competing.

    Source: SnapKV (arXiv 2404.14469), Sec. 4; Ada-KV (arXiv 2407.11550), Alg. 2, lines 2-4, and Sec. 3.4 for
        groups.
    Differs: no. Ada-KV's released code and kvpress use order="mean-pool" and pooling="avg" respectively.
    Cost: window_size * num_tokens * head_dim per query head.
    """

    window_size: int = 32
    kernel_size: int = 7
    pooling: Literal["max", "avg"] = "max"
    order: Literal["pool-mean", "mean-pool"] = "pool-mean"
    keep_window: bool = True
    needs = frozenset({Signal.WINDOW_QUERIES, Signal.KEYS})
    traits = frozenset({Trait.COMPARABLE})

    @property
    def kept_window(self) -> int:
        """The whole window, or nothing."""
        return self.window_size if self.keep_window else 0

    def score(self, view: LayerView) -> TokenScores:
        """Score one layer."""
        window = view.need_window().last(self.window_size)
        pooled, mean = window_scores(
            window.queries,
            window.lse,
            view.k_buffer,
            view.token_slots,
            sm_scale=view.stored_sm_scale,
            key_start=view.start,
            query_start=window.start,
            kernel_size=self.kernel_size,
            pooling=self.pooling,
            order=self.order,
        )
        return TokenScores(pooled, None if self.kernel_size == 1 else mean)
