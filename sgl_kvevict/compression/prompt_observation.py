"""What a prefill leaves behind of a prompt, layer by layer: the signals that the policy needs."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace

from torch import Tensor

from kvevict_kernels.rotary import Rotary
from sgl_kvevict.compression.collectors import Chunk, Collector, collected
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.policies.layer_view import LayerView
from sgl_kvevict.policies.signals import Signal


@dataclass(frozen=True)
class ObservationSpec:
    """What the policy wants to know of a prefill.

    Attributes:
        geometry: sizes of the model.
        signals: what to collect.
        window_size: queries to keep for :attr:`Signal.WINDOW_QUERIES`, at most; keys for :attr:`Signal.WINDOW_KEYS`.
        rotary: the model's rotary embedding, for signals whose collectors turn queries.
        output_grams: [num_layers, num_kv_heads, head_dim, head_dim], float32, for :attr:`Signal.OUTPUT_GRAM`.
    """

    geometry: KVGeometry
    signals: frozenset[Signal]
    window_size: int = 0
    rotary: Rotary | None = None
    output_grams: Tensor | None = None


@dataclass
class _Layer:
    """What was collected in one layer."""

    collectors: dict[Signal, Collector]
    sm_scale: float = 0.0


class PromptObservation:
    """What was seen of one prompt, layer by layer, while its prefill ran over any number of chunks.

    Only queries that this prefill computed count: those of tokens that were found in the cache are gone. Nothing is
    collected in layers with a window: what they keep follows from the tokens' positions alone.

    Args:
        spec: what to collect.

    Attributes:
        first_query: logical position of the first query seen: what is before it was found in the cache.
        end: logical position after the last query seen.
        is_complete: the whole prompt was seen, and nothing went wrong.
    """

    def __init__(self, spec: ObservationSpec) -> None:
        self.spec = spec
        self.first_query = 0
        self.end = 0
        self.is_complete = False
        self._has_failed = False
        self._chunk_start = 0
        self._key_start = 0
        self._token_slots: Tensor | None = None
        self._layers: list[_Layer] = []

    @property
    def needs_slots(self) -> bool:
        """Whether :meth:`begin_chunk` needs the token slots of the keys."""
        return any(kind.needs_slots for kind in collected(self.spec.signals).values())

    @property
    def records(self) -> bool:
        """Whether :meth:`record` collects anything."""
        return bool(collected(self.spec.signals))

    @property
    def num_bytes(self) -> int:
        """Memory of what was recorded, as far as it counts towards ``observation_bytes``."""
        return sum(collector.num_bytes for seen in self._layers for collector in seen.collectors.values())

    @property
    def has_echo(self) -> bool:
        """Echo attention was collected: what is compressed needs no other scores."""
        return Signal.ECHO_ATTENTION in self.spec.signals

    def without_echo(self) -> PromptObservation:
        """A copy for those who do not look at echo attention, which grows with the prompt."""
        other = copy(self)
        other.spec = replace(self.spec, signals=self.spec.signals - {Signal.ECHO_ATTENTION})
        kept = collected(other.spec.signals)
        other._layers = [
            replace(seen, collectors={signal: copy(one) for signal, one in seen.collectors.items() if signal in kept})
            for seen in self._layers
        ]
        return other

    def begin_chunk(
        self, start: int, end: int, *, is_last: bool, key_start: int = 0, token_slots: Tensor | None = None
    ) -> None:
        """Announce that queries ``[start, end)`` follow, for every layer.

        Args:
            start: logical position of the chunk's first token; not where the last chunk ended: start afresh.
                What was summed up of tokens that were compressed since the last chunk is forgotten.
            end: logical position after the chunk's last token.
            is_last: the prompt ends here.
            key_start: waterline; keys from here on are in ordinary slots.
            token_slots: [end - key_start], int64, slots of the tokens ``[key_start, end)``; only if needed.
        """
        if start != self.end or key_start < self._key_start or not self._layers:
            kinds, geometry = collected(self.spec.signals), self.spec.geometry
            self._layers = [
                _Layer({} if geometry.window(layer) else {signal: kind() for signal, kind in kinds.items()})
                for layer in range(geometry.num_layers)
            ]
            self.first_query = start
        elif key_start > self._key_start:
            for seen in self._layers:
                for collector in seen.collectors.values():
                    collector.forget(key_start - self._key_start)
        self._key_start = key_start
        self._chunk_start = start
        self._token_slots = token_slots
        self.end = end
        self.is_complete = is_last and not self._has_failed

    def fail(self) -> None:
        """Something could not be recorded: the prompt counts as not seen."""
        self._has_failed = True
        self.is_complete = False

    def record(self, layer: int, queries: Tensor, lse: Tensor, k_buffer: Tensor, sm_scale: float) -> None:
        """Collect from one layer of the chunk.

        Args:
            layer: layer index.
            queries: [num_tokens, num_qo_heads, head_dim], after RoPE.
            lse: [num_tokens, num_qo_heads], float32, natural log-sum-exp over all keys each query saw.
            k_buffer: [num_token_slots, num_kv_heads, head_dim], the layer's keys, the chunk's included.
            sm_scale: softmax scale of the layer.
        """
        seen = self._layers[layer]
        seen.sm_scale = sm_scale
        chunk = Chunk(
            queries=queries,
            lse=lse,
            query_start=self._chunk_start,
            k_buffer=k_buffer,
            key_start=self._key_start,
            token_slots=self._token_slots,
            sm_scale=sm_scale,
            k_scale=self.spec.geometry.scales.of(layer)[0],
            window_size=self.spec.window_size,
            rotary=self.spec.rotary,
        )
        for collector in seen.collectors.values():
            collector.add(chunk)

    def show(self, layer: int, start: int, k_buffer: Tensor, v_buffer: Tensor, token_slots: Tensor) -> LayerView:
        """Return what a policy sees of a range in one layer.

        Args:
            layer: layer index.
            start: logical position of the range's first token.
            k_buffer: [num_token_slots, num_kv_heads, head_dim].
            v_buffer: likewise.
            token_slots: [num_tokens], int64, slots of the range.
        """
        seen = self._layers[layer]
        first, num_tokens = start - self._key_start, token_slots.numel()
        values = {signal: collector.value(first, num_tokens) for signal, collector in seen.collectors.items()}
        signals = {signal: value for signal, value in values.items() if value is not None}
        if self.spec.output_grams is not None:
            signals[Signal.OUTPUT_GRAM] = self.spec.output_grams[layer]
        k_scale, v_scale = self.spec.geometry.scales.of(layer)
        return LayerView(
            layer=layer,
            start=start,
            k_buffer=k_buffer,
            v_buffer=v_buffer,
            token_slots=token_slots,
            sm_scale=seen.sm_scale,
            signals=signals,
            num_prompt_tokens=self.end,
            k_scale=k_scale,
            v_scale=v_scale,
        )


class CacheObservation:
    """Nothing was seen, or nothing is left of it: what the cache holds of a range has to do."""

    num_bytes = 0

    def show(self, layer: int, start: int, k_buffer: Tensor, v_buffer: Tensor, token_slots: Tensor) -> LayerView:
        """Return keys and values of a range in one layer; see :meth:`PromptObservation.show`."""
        return LayerView(layer, start, k_buffer, v_buffer, token_slots, sm_scale=0.0)
