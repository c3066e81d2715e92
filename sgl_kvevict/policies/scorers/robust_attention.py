"""The worst case over the window instead of its average, weighted by what a value adds: the score of ``defensive``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvevict_kernels.accumulated_attention import accumulated_attention
from sgl_kvevict.policies.observation import LayerObservation, Signal
from sgl_kvevict.policies.parts import TokenScores, Trait


@dataclass(frozen=True)
class RobustAttentionScorer:
    """Largest attention of the last ``window_size`` queries, floored by its mean, times the size of the value.

    A mean forgets what only one query needed. No token counts less than the head's average one, so that heads whose
    window looked at nothing in particular do not rank by noise. A value counts as large as it arrives in the residual
    stream.

    Attributes:
        window_size: queries in the observation window.
        use_floor: floor by the mean over the range.
        use_value_norm: multiply by the norm of the value, through the output projection.

    Source: DefensiveKV (max over window and group, floored by the mean); CriticalKV (arXiv 2502.03805), Sec. 4
        (the norm).
    Differs: the 2-norm over all query heads of a group instead of the 1-norm of each.
    Cost: window_size * num_tokens * head_dim per query head, and num_tokens * head_dim^2 per KV head.
    """

    window_size: int = 32
    use_floor: bool = True
    use_value_norm: bool = True
    traits: ClassVar[frozenset[Trait]] = frozenset({Trait.COMPARABLE})

    @property
    def needs(self) -> frozenset[Signal]:
        """Window and keys; values and output projection only for the norm."""
        norm = {Signal.VALUES, Signal.OUTPUT_GRAM} if self.use_value_norm else set()
        return frozenset({Signal.WINDOW_QUERIES, Signal.KEYS, *norm})

    @property
    def kept_window(self) -> int:
        """The whole window."""
        return self.window_size

    def score(self, observation: LayerObservation) -> TokenScores:
        """Score one layer.

        Raises:
            ValueError: the observation has no query window, or no output projection.
        """
        window = observation.require_window(type(self).__name__).last(self.window_size)
        peaks = accumulated_attention(
            window.queries,
            window.lse,
            observation.k_buffer,
            observation.token_slots,
            sm_scale=observation.stored_sm_scale,
            key_start=observation.start,
            query_start=window.start,
            reduction="max",
        )
        if self.use_floor:
            peaks = peaks.clamp(min=peaks.mean(-1, keepdim=True))
        if self.use_value_norm:
            peaks = peaks * _output_norms(observation, type(self).__name__)
        return TokenScores(peaks)


def output_gram(weight: Tensor, num_kv_heads: int, head_dim: int) -> Tensor:
    """Product of an output projection with itself, summed over the query heads that read a KV head.

    ``v @ gram @ v`` is the squared length of what a value adds to the residual stream.

    Args:
        weight: [hidden_size, num_qo_heads * head_dim], any float dtype.
        num_kv_heads: KV heads.
        head_dim: width of a head.

    Returns:
        [num_kv_heads, head_dim, head_dim], float32.
    """
    by_head = weight.detach().float().t().reshape(num_kv_heads, -1, head_dim, weight.shape[0])
    return torch.einsum("hgdo,hgeo->hde", by_head, by_head)


def _output_norms(observation: LayerObservation, who: str) -> Tensor:
    """[num_kv_heads, num_tokens], float32: norm of each value after the output projection."""
    values = observation.values.transpose(0, 1).float()
    projected = values @ observation.require_output_gram(who)
    return projected.mul_(values).sum(-1).clamp_(min=0).sqrt_()
