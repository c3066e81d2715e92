"""What the readers of a prefix leave behind for the policy: one number per (layer, KV head, token)."""

from __future__ import annotations

import torch
from torch import Tensor

from kvevict_kernels.accumulated_attention import accumulated_attention
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.policies.observation import LayerObservation


class ReaderObservation:
    """The largest attention that any query of any reader paid each token of ``[start, end)``.

    Maxima combine in any order and do not mind being taken twice, so readers may come in chunks, be retracted and run
    again.

    Args:
        geometry: sizes of the model.
        start: logical position of the range's first token.
        end: logical position after its last one.

    Attributes:
        num_readers: readers seen to their end.
    """

    def __init__(self, geometry: KVGeometry, start: int, end: int) -> None:
        self.start = start
        self.end = end
        self.num_readers = 0
        self._geometry = geometry
        self._peaks: Tensor | None = None
        self._sm_scales = [0.0] * geometry.num_layers
        self._query_start = end
        self._token_slots: Tensor | None = None

    def begin_chunk(self, query_start: int, token_slots: Tensor) -> None:
        """Announce queries of a reader, for every layer.

        Args:
            query_start: logical position of the chunk's first token, at or after ``end``.
            token_slots: [end - start], int64, slots of the range.
        """
        self._query_start = query_start
        self._token_slots = token_slots

    def record(self, layer: int, queries: Tensor, lse: Tensor, k_buffer: Tensor, sm_scale: float) -> None:
        """Collect from one layer of the chunk.

        Args:
            layer: layer index.
            queries: [num_tokens, num_qo_heads, head_dim], after RoPE.
            lse: [num_tokens, num_qo_heads], float32, natural log-sum-exp over all keys each query saw.
            k_buffer: [num_token_slots, num_kv_heads, head_dim], the layer's keys.
            sm_scale: softmax scale of the layer.
        """
        assert self._token_slots is not None
        if self._peaks is None:
            shape = (self._geometry.num_layers, self._geometry.num_kv_heads, self.end - self.start)
            self._peaks = torch.zeros(shape, device=k_buffer.device)
        peaks = accumulated_attention(
            queries.contiguous(),
            lse.contiguous(),
            k_buffer,
            self._token_slots,
            sm_scale=sm_scale,
            key_start=self.start,
            query_start=self._query_start,
            reduction="max",
        )
        torch.maximum(self._peaks[layer], peaks, out=self._peaks[layer])
        self._sm_scales[layer] = sm_scale

    def show(self, layer: int, start: int, k_buffer: Tensor, v_buffer: Tensor, token_slots: Tensor) -> LayerObservation:
        """Return what a policy sees of a part of the range in one layer; see :meth:`PromptObservation.show`."""
        first = start - self.start
        peaks = None if self._peaks is None else self._peaks[layer, :, first : first + token_slots.numel()]
        return LayerObservation(
            layer=layer,
            start=start,
            k_buffer=k_buffer,
            v_buffer=v_buffer,
            token_slots=token_slots,
            sm_scale=self._sm_scales[layer],
            peaks=peaks,
        )
