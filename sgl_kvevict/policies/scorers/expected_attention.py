"""Attention that future queries are expected to pay, from the distribution of past ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from sgl_kvevict.policies.observation import LayerObservation, Signal
from sgl_kvevict.policies.parts import TokenScores, Trait


@dataclass(frozen=True)
class ExpectedAttentionScorer:
    """Future queries are taken as Gaussian, with mean and covariance of the prompt's queries before RoPE.

    The Gaussian is turned by the mean rotation of the next ``num_future_positions`` positions; the
    expectation of ``exp(logit)`` is then closed-form. Scores are normalised over the range, averaged over the
    query heads of a group and multiplied by the value's norm. Question-agnostic.

    Attributes:
        num_future_positions: positions after the prompt that the rotation is averaged over.
        num_sink_tokens: first positions of a path left out of the normalisation (they are kept anyway).
        use_covariance: with the second-order term.
        use_value_norm: multiply by the norm of the value.
        epsilon: added to the normalised scores before that.

    Source: Expected Attention (arXiv 2510.00636), Sec. 3.
    Differs: normalised over the range to compress, not over the whole prompt.
    Cost: num_tokens * head_dim^2 per query head.
    """

    num_future_positions: int = 512
    num_sink_tokens: int = 4
    use_covariance: bool = True
    use_value_norm: bool = True
    epsilon: float = 0.0
    traits: ClassVar[frozenset[Trait]] = frozenset({Trait.COMPARABLE})
    window_size: ClassVar[int] = 0
    kept_window: ClassVar[int] = 0

    @property
    def needs(self) -> frozenset[Signal]:
        """Query moments and keys; values only for their norm."""
        values = {Signal.VALUES} if self.use_value_norm else set()
        return frozenset({Signal.QUERY_MOMENTS, Signal.KEYS, *values})

    def score(self, observation: LayerObservation) -> TokenScores:
        """Score one layer.

        Raises:
            ValueError: the observation has no query moments or no prompt length.
        """
        moments = observation.require_moments(type(self).__name__)
        length = observation.require_prompt_length(type(self).__name__)
        head_dim = observation.k_buffer.shape[-1]
        turn = moments.rotary.mean_rotation(length, self.num_future_positions, head_dim)
        by_head = (observation.num_kv_heads, -1, head_dim)
        mean = (moments.mean @ turn.T).view(by_head)
        spread = (turn @ moments.covariance @ turn.T).view(*by_head, head_dim) if self.use_covariance else None
        num_sinks = min(max(self.num_sink_tokens - observation.start, 0), observation.num_tokens - 1)
        keys = observation.keys
        scores = torch.empty(observation.num_kv_heads, observation.num_tokens, device=keys.device)
        for head in range(observation.num_kv_heads):  # float32 copies are as large as the keys: one head at a time
            rows = keys[:, head].float()
            logits = mean[head] @ rows.T * observation.sm_scale  # [G, N]
            if spread is not None:
                for member, one in enumerate(spread[head]):
                    logits[member] += (rows @ one).mul_(rows).sum(-1) * (observation.sm_scale**2 / 2)
            logits[:, :num_sinks] = -torch.inf
            scores[head] = logits.softmax(-1).mean(0)
        if self.use_value_norm:
            scores = (scores + self.epsilon) * observation.values.norm(dim=-1, dtype=torch.float32).T
        return TokenScores(scores)
