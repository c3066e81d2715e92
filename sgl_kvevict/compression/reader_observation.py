"""What the readers of a prefix leave behind for the policy: one or two numbers per (layer, KV head, token)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvevict_kernels.accumulated_attention import accumulated_attention
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.policies.echo import echo_attention
from sgl_kvevict.policies.observation import LayerObservation
from sgl_kvevict.policies.rotary import Rotary


@dataclass(frozen=True)
class Repetition:
    """From ``position`` on, a reader repeats the tokens of the range from ``source`` on (logical positions)."""

    position: int
    source: int


class ReaderObservation:
    """The largest attention that any query of any reader paid each token of ``[start, end)``.

    Maxima combine in any order and do not mind being taken twice, so readers may come in chunks, be retracted and run
    again.

    Args:
        geometry: sizes of the model.
        start: logical position of the range's first token.
        end: logical position after its last one.
        rotary: the model's rotary embedding, if readers that repeat the range are to leave their echo too: what their
            queries would attend to from right behind the tokens they repeat, see
            :func:`sgl_kvevict.policies.echo.echo_attention`.

    Attributes:
        num_readers: readers seen to their end.
    """

    def __init__(self, geometry: KVGeometry, start: int, end: int, rotary: Rotary | None = None) -> None:
        self.start = start
        self.end = end
        self.num_readers = 0
        self._rotary = rotary
        self._peaks = _Peaks(geometry, end - start)
        self._echo = _Peaks(geometry, end - start)
        self._sm_scales = [0.0] * geometry.num_layers
        self._query_start = end
        self._token_slots: Tensor | None = None
        self._repetition: Repetition | None = None

    def begin_chunk(self, query_start: int, token_slots: Tensor, repetition: Repetition | None = None) -> None:
        """Announce queries of a reader, for every layer.

        Args:
            query_start: logical position of the chunk's first token, at or after ``end``.
            token_slots: [end - start], int64, slots of the range.
            repetition: where the reader repeats the range, if it does.
        """
        self._query_start = query_start
        self._token_slots = token_slots
        self._repetition = repetition

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
        self._sm_scales[layer] = sm_scale
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
        self._peaks.add(layer, peaks)
        if self._rotary is None or self._repetition is None:
            return
        before = self._repetition.position - self._query_start  # the chunk's tokens that repeat nothing yet
        repeating = queries[max(before, 0) :]
        if repeating.shape[0]:
            echo = echo_attention(
                repeating,
                k_buffer,
                self._token_slots,
                sm_scale=sm_scale,
                key_start=self.start,
                query_start=self._repetition.source + max(-before, 0),
                position=self._query_start + max(before, 0),
                rotary=self._rotary,
            )
            self._echo.add(layer, echo)

    def show(self, layer: int, start: int, k_buffer: Tensor, v_buffer: Tensor, token_slots: Tensor) -> LayerObservation:
        """Return what a policy sees of a part of the range in one layer; see :meth:`PromptObservation.show`."""
        part = slice(start - self.start, start - self.start + token_slots.numel())
        return LayerObservation(
            layer=layer,
            start=start,
            k_buffer=k_buffer,
            v_buffer=v_buffer,
            token_slots=token_slots,
            sm_scale=self._sm_scales[layer],
            peaks=self._peaks.of(layer, part),
            echo=self._echo.of(layer, part),
        )


class _Peaks:
    """Maxima per (layer, KV head, token); no memory before the first."""

    def __init__(self, geometry: KVGeometry, num_tokens: int) -> None:
        self._shape = (geometry.num_layers, geometry.num_kv_heads, num_tokens)
        self._values: Tensor | None = None

    def add(self, layer: int, values: Tensor) -> None:
        """Take the larger ones; ``values``: [num_kv_heads, num_tokens], float32."""
        if self._values is None:
            self._values = torch.zeros(self._shape, device=values.device)
        torch.maximum(self._values[layer], values, out=self._values[layer])

    def of(self, layer: int, part: slice) -> Tensor | None:
        """Maxima of some tokens (a view); None if there are none."""
        return None if self._values is None else self._values[layer, :, part]
