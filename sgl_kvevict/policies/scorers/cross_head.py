"""K-VEC's scores: window attention, with the least focused heads looking further back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d

from sgl_kvevict.policies.observation import LayerObservation, Signal
from sgl_kvevict.policies.parts import TokenScores, Trait
from sgl_kvevict.policies.rounding import exact_fraction
from sgl_kvevict.policies.scorers.attention_rows import rows_after_range, window_rows


@dataclass(frozen=True)
class CrossHeadScorer:
    """Mean attention of the last queries; the flattest heads of a layer use a longer window.

    Flat means: the smallest standard deviation over the tokens. Besides, every token gets an importance for the
    layer: the maximum over the KV heads, averaged over the window, for the selector's cross-layer bonus.

    Attributes:
        window_size: longest window any head looks at (``O'``).
        base_window: window of all other heads (``O``), and the one that is kept.
        rescored_share: share of the KV heads with the longer window, rounded to heads (half up); 3 of 8 in the paper
            (``delta``).
        kernel_size: width of a max pool over the mean, odd; 1 = none. Importance is never pooled.
        keep_window: tokens of the base window that lie inside the range are kept without competing.

    Source: K-VEC (arXiv 2606.29563), Eq. 8, 10, 11, 13; Alg. 1, lines 2-8.
    Differs: "heads" are KV heads, and a KV head's rows are the mean over its query heads (the paper's figures
        imply it). Its algorithm's comment calls the flattest heads "most focused"; equation and text say
        least. The deviation is over all tokens of the prompt (Eq. 10) that can be seen: the range, and the window's own
        tokens behind it; what was compressed before the range is gone.
    Cost: window_size * num_tokens * head_dim per query head.
    """

    window_size: int = 32
    base_window: int = 16
    rescored_share: float = 0.375
    kernel_size: int = 1
    keep_window: bool = True
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.WINDOW_QUERIES, Signal.WINDOW_KEYS, Signal.KEYS})
    traits: ClassVar[frozenset[Trait]] = frozenset({Trait.COMPARABLE, Trait.IMPORTANCE})

    @property
    def kept_window(self) -> int:
        """The base window, or nothing."""
        return self.base_window if self.keep_window else 0

    def num_rescored(self, num_heads: int) -> int:
        """KV heads of a layer that look further back."""
        return int(exact_fraction(self.rescored_share) * num_heads + exact_fraction(0.5))

    def caution(self, num_kv_heads: int) -> str | None:
        """What the scorer's cross-head part cannot do with so many KV heads; None if it can."""
        count = self.num_rescored(num_kv_heads)
        if not self.rescored_share or 0 < count < num_kv_heads:
            return None
        looking = "no head looks" if count == 0 else "every head looks"
        return (
            f"rescored_share={self.rescored_share} of {num_kv_heads} KV heads is {count}: {looking} further back than "
            "the others, so nothing is left of the cross-head part"
        )

    def score(self, observation: LayerObservation) -> TokenScores:
        """Score one layer.

        Raises:
            ValueError: the observation has no query window, or that has no keys.
        """
        window = observation.require_window(type(self).__name__).last(self.window_size)
        rows = window_rows(observation, window)
        base_rows = rows[:, -self.base_window :]
        scores, longer = self._pool(base_rows.mean(1)), self._pool(rows.mean(1))
        count = self.num_rescored(rows.shape[0])
        if count:
            behind = rows_after_range(observation, window)[:, -self.base_window :].mean(1)
            spread = torch.cat((scores, self._pool(behind)), dim=-1).double().std(-1, correction=0)
            flattest = spread.sort(stable=True).indices[:count]
            scores = scores.index_copy(0, flattest, longer[flattest])
        return TokenScores(scores, importance=base_rows.amax(0).mean(0))

    def _pool(self, mean: Tensor) -> Tensor:
        if self.kernel_size == 1 or not mean.shape[-1]:
            return mean
        pooled: Tensor = max_pool1d(mean, self.kernel_size, 1, self.kernel_size // 2)
        return pooled
