"""The largest attention that any reader paid: the score of context reconstruction and of sample questions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sgl_kvevict.policies.observation import LayerObservation, Signal
from sgl_kvevict.policies.parts import TokenScores, Trait


@dataclass(frozen=True)
class PeakAttentionScorer:
    """How much attention each token got from the query that needed it most.

    The maximum, not the mean: a token that one question out of a hundred needs is as dear as one that all need.

    Attributes:
        use_echo: take the geometric mean with the readers' echo, where they left one. A reader far behind the prefix
            sees all of it at once, and what it finds is one of many; from right behind a token its query sees the
            neighbourhood alone. What is needed in both is what the model looks up.

    Source: KVzip (arXiv 2505.23416), Sec. 3, Eq. 3; the echo is a scheme of this project.
    Differs: attention weights over everything the query sees, instead of a softmax over one chunk's keys; a chunk's
        queries score the whole prefix, not only their own chunk.
    """

    use_echo: bool = False
    traits: ClassVar[frozenset[Trait]] = frozenset({Trait.COMPARABLE})
    window_size: ClassVar[int] = 0
    kept_window: ClassVar[int] = 0

    @property
    def needs(self) -> frozenset[Signal]:
        """Peaks, and the echo if it is used."""
        return frozenset({Signal.PEAK_ATTENTION, *({Signal.ECHO_ATTENTION} if self.use_echo else ())})

    def score(self, observation: LayerObservation) -> TokenScores:
        """Score one layer; readers that repeated nothing (questions given with the prefix) left peaks only.

        Raises:
            ValueError: the observation has no peak attention.
        """
        peaks = observation.require_peaks(type(self).__name__)
        if not self.use_echo or observation.echo is None:
            return TokenScores(peaks)
        return TokenScores((peaks * observation.require_echo(type(self).__name__)).sqrt())
