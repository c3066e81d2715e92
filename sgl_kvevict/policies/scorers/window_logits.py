"""Raw dot products of the window's queries with the keys: ChunkKV's Algorithm 1 as printed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sgl_kvevict.policies.observation import LayerObservation, Signal
from sgl_kvevict.policies.parts import TokenScores, Trait
from sgl_kvevict.policies.scorers.attention_rows import window_logits


@dataclass(frozen=True)
class WindowLogitsScorer:
    """Sum over the window of ``q . k``, without scale, mask or softmax.

    Logits can be negative, so long chunks are punished; offered for comparison only.

    Attributes:
        window_size: queries in the observation window.
        keep_window: tokens of the window that lie inside the range are kept without competing.

    Source: ChunkKV (arXiv 2502.00299), Alg. 1, line 1, taken literally.
    Differs: with grouped queries, the mean over a group.
    """

    window_size: int = 32
    keep_window: bool = True
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.WINDOW_QUERIES, Signal.KEYS})
    traits: ClassVar[frozenset[Trait]] = frozenset()

    @property
    def kept_window(self) -> int:
        """The whole window, or nothing."""
        return self.window_size if self.keep_window else 0

    def score(self, observation: LayerObservation) -> TokenScores:
        """Score one layer.

        Raises:
            ValueError: the observation has no query window.
        """
        window = observation.require_window(type(self).__name__).last(self.window_size)
        return TokenScores(window_logits(observation, window))
