"""K-VEC's scores: window attention, with the least focused heads looking further back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn.functional import max_pool1d

from sgl_kvevict.policies.observation import LayerObservation, QueryWindow, Signal
from sgl_kvevict.policies.parts import TokenScores, Trait
from sgl_kvevict.policies.scorers.attention_rows import window_rows


@dataclass(frozen=True)
class CrossHeadScorer:
    """Mean attention of the last queries; the ``num_rescored_heads`` flattest heads use a longer window.

    Flat means: the smallest standard deviation over the competing tokens. Besides, every token gets an
        importance for
    the layer: the maximum over the KV heads, averaged over the window, for the selector's cross-layer bonus.

    Attributes:
        window_size: longest window any head looks at (``O'``).
        base_window: window of all other heads (``O``), and the one that is kept.
        num_rescored_heads: heads with the longer window (``delta``); at most all.
        kernel_size: width of a max pool over the mean, odd; 1 = none. Importance is never pooled.
        keep_window: tokens of the base window that lie inside the range are kept without competing.

    Source: K-VEC (arXiv 2606.29563), Eq. 8, 10, 11, 13; Alg. 1, lines 2-8.
    Differs: "heads" are KV heads, and a KV head's rows are the mean over its query heads (the paper's figures
        imply it). Its algorithm's comment calls the flattest heads "most focused"; equation and text say
        least.
    Cost: window_size * num_tokens * head_dim per query head.
    """

    window_size: int = 32
    base_window: int = 16
    num_rescored_heads: int = 3
    kernel_size: int = 1
    keep_window: bool = True
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.WINDOW_QUERIES, Signal.KEYS})
    traits: ClassVar[frozenset[Trait]] = frozenset({Trait.COMPARABLE, Trait.IMPORTANCE})

    @property
    def kept_window(self) -> int:
        """The base window, or nothing."""
        return self.base_window if self.keep_window else 0

    def score(self, observation: LayerObservation) -> TokenScores:
        """Score one layer.

        Raises:
            ValueError: the observation has no query window.
        """
        window = observation.require_window(type(self).__name__).last(self.window_size)
        rows = window_rows(observation, window)
        base_rows = rows[:, -self.base_window :]
        scores, longer = self._pool(base_rows.mean(1)), self._pool(rows.mean(1))
        count = min(self.num_rescored_heads, rows.shape[0])
        if count:
            spread = scores[:, : self._num_competing(observation, window)].double().std(-1, correction=0)
            flattest = spread.sort(stable=True).indices[:count]
            scores = scores.index_copy(0, flattest, longer[flattest])
        return TokenScores(scores, importance=base_rows.amax(0).mean(0))

    def _num_competing(self, observation: LayerObservation, window: QueryWindow) -> int:
        """Tokens of the range before the kept window, at least one."""
        kept_from = window.last(self.base_window).start if self.keep_window else window.end
        return min(max(kept_from - observation.start, 1), observation.num_tokens)

    def _pool(self, mean: Tensor) -> Tensor:
        if self.kernel_size == 1:
            return mean
        pooled: Tensor = max_pool1d(mean, self.kernel_size, 1, self.kernel_size // 2)
        return pooled
