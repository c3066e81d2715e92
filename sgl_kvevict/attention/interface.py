"""The interface of all implementations of attention: plan a forward, run a layer; and what sink logits do to it."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from sgl_kvevict.attention.batch import AttentionBatch
from sgl_kvevict.geometry import KVGeometry


class Attention(Protocol):
    """Attention of new tokens over compressed spans (other keys per KV head) and uncompressed token slots."""

    @property
    def geometry(self) -> KVGeometry:
        """Sizes."""

    def plan(self, batch: AttentionBatch) -> None:
        """Prepare the layers of one forward."""

    def run(self, layer: int, q: Tensor, sm_scale: float, sink_logits: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Attend as planned. K and V of the new tokens are in the arena.

        Args:
            layer: layer index; a layer with a window (``geometry.windows``) sees that many tokens.
            q: [num_new_tokens, num_qo_heads, head_dim], request after request.
            sm_scale: softmax scale.
            sink_logits: [num_qo_heads], any floating dtype: one more score in the softmax of every query, whose value
                is 0; None: the layer has none.

        Returns:
            out [num_new_tokens, num_qo_heads, v_head_dim], in the dtype of ``q``, and lse [num_new_tokens,
            num_qo_heads], float32, natural log-sum-exp of the scaled scores over everything that a query saw, the sink
            logit included: ``exp(score - lse)`` is the attention paid to a token.

        Raises:
            InvariantError: other new tokens than planned.
        """


def with_sink_logits(out: Tensor, lse: Tensor, sink_logits: Tensor | None) -> tuple[Tensor, Tensor]:
    """Add the sink logits [num_qo_heads] (any floating dtype) to a finished softmax; None: nothing changes.

    ``out`` is [num_new_tokens, num_qo_heads, head_dim], ``lse`` [num_new_tokens, num_qo_heads] (float32, natural); so
    are the results.
    """
    if sink_logits is None:
        return out, lse
    # The sink's value is 0, so it only makes the other weights smaller: one factor for each query and head.
    total = torch.logaddexp(lse, sink_logits.float())
    return (out.float() * torch.exp(lse - total)[..., None]).to(out.dtype), total
