"""The interface of all implementations of attention: plan a forward, run a layer."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

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
        """Prepare the layers of one forward.

        Args:
            batch: the requests of the forward.
        """

    def run(self, layer: int, q: Tensor, sm_scale: float, sink_logits: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Attend as planned. K and V of the new tokens are in the arena.

        Args:
            layer: layer index; a layer with a window (``geometry.windows``) sees that many tokens.
            q: [num_new_tokens, num_qo_heads, head_dim], request after request.
            sm_scale: softmax scale.
            sink_logits: [num_qo_heads], of any floating dtype: one more score in the softmax of every query, whose
                value is 0; None: the layer has none.

        Returns:
            out [num_new_tokens, num_qo_heads, head_dim], dtype of ``q``, and lse [num_new_tokens, num_qo_heads],
            float32, natural log-sum-exp of the scaled scores over everything that a query saw, the sink logit
            included: ``exp(score - lse)`` is the attention that a query pays to a token.

        Raises:
            InvariantError: other new tokens than planned.
        """


@runtime_checkable
class CompiledAttention(Attention, Protocol):
    """Attention by kernels that are compiled when they are launched first."""

    def warm_up(self, sink_dtype: torch.dtype | None = None) -> None:
        """Launch every kernel once as serving does, so that none is compiled while requests wait.

        Args:
            sink_dtype: of the sink logits that all layers have; None: none has any.
        """


@runtime_checkable
class CapturableAttention(CompiledAttention, Protocol):
    """Attention whose decode steps a CUDA graph may record.

    Before the recording :meth:`start_capture`; recorded are one :meth:`start_step` and :meth:`Attention.run` of every
    layer; before each replay :meth:`follow`.
    """

    def start_capture(self, num_requests: int) -> None:
        """Lay out decode steps of so many requests."""

    def start_step(self, seq_lens: Tensor, req_pool_indices: Tensor, req_to_token: Tensor) -> None:
        """Take the lengths of one forward of the batch laid out last; replays read them from the same memory.

        Args:
            seq_lens: [num_requests], int, logical tokens with the new ones.
            req_pool_indices: [num_requests], int, rows of ``req_to_token``.
            req_to_token: [num_rows, max_context_len], int32, token slots.

        Raises:
            InvariantError: no batch is laid out.
        """

    def follow(self, batch: AttentionBatch, num_requests: int) -> None:
        """Give the next replay the spans of its requests; it reads lengths and rows where :meth:`start_step` did.

        Args:
            batch: a decode step.
            num_requests: of the recorded step; requests beyond the batch are fillers.

        Raises:
            InvariantError: the batch has more requests, or is not a decode step.
        """
