"""Scorers shared by several policies; others are in their policy's file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from kvevict_kernels.key_scores import window_scores
from sgl_kvevict.policies.layer_view import LayerView
from sgl_kvevict.policies.parts import Scorer, TokenScores, Trait
from sgl_kvevict.policies.signals import Signal


@dataclass(frozen=True)
class AccumulatedAttentionScorer(Scorer):
    """Attention that each token received from all queries so far.

    Plain sums (H2O, D2O) favour early tokens, because more queries see them. With ``normalize="queries"`` they are
    divided by the number of these queries, as kvpress' ObservedAttention and RoCo do.

    Source: H2O (arXiv 2306.14048), Sec. 4; D2O, Eq. 6.
    Differs: evaluated once, when a range is compressed, not at every decode step. With grouped queries, the
        mean over a group. Tokens left from an earlier turn count the queries of the observed prompt only.
    """

    normalize: Literal["none", "queries"] = "none"
    needs = frozenset({Signal.ACCUMULATED_ATTENTION})

    @property
    def traits(self) -> frozenset[Trait]:
        """Comparable; plain sums also measure a layer's density."""
        sums = frozenset({Trait.ATTENTION_SUMS}) if self.normalize == "none" else frozenset()
        return sums | {Trait.COMPARABLE}

    def score(self, view: LayerView) -> TokenScores:
        """Score one layer; ValueError if normalised without a prompt length."""
        sums = view.need_per_token(Signal.ACCUMULATED_ATTENTION)
        if self.normalize == "none":
            return TokenScores(sums)
        if view.num_prompt_tokens is None:
            raise ValueError("the policy needs the length of the prompt (num_prompt_tokens), got none")
        seen_by = view.num_prompt_tokens - view.start
        # A token is seen by itself and by all later queries of the prompt.
        queries = torch.arange(seen_by, seen_by - view.num_tokens, -1, device=sums.device)
        return TokenScores(sums / queries)


@dataclass(frozen=True)
class WindowAttentionScorer(Scorer):
    """Mean attention of the last ``window_size`` queries, smoothed by a pool along the tokens.

    The softmax runs over everything a query saw, not only over the range. A KV head's score is the mean over its query
    heads. The unpooled mean breaks ties, because a max pool makes plateaus on which the peak itself could be evicted.

    Attributes:
        kernel_size: width of the pool, odd; 1 = no pool.
        order: "pool-mean" pools each query's row, then averages; "mean-pool" averages first.
        keep_window: window tokens inside the range are kept in every head without competing.

    Source: SnapKV (arXiv 2404.14469), Sec. 4; Ada-KV (arXiv 2407.11550), Alg. 2, lines 2-4, and Sec. 3.4 for groups.
    Differs: no. Ada-KV's released code uses order="mean-pool", kvpress pooling="avg".
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
        return self.window_size if self.keep_window else 0

    def score(self, view: LayerView) -> TokenScores:
        """Score one layer."""
        window = view.need_window().last(self.window_size)
        pooled, mean = window_scores(
            **view.attention_of(window),
            kernel_size=self.kernel_size,
            pooling=self.pooling,
            order=self.order,
        )
        return TokenScores(pooled, None if self.kernel_size == 1 else mean)
