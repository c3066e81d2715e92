"""Prompt observation: signals collected layer by layer during a prefill."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from torch import Tensor

from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.policies.layer_view import LayerView
from sgl_kvevict.policies.signals import Signal
from sgl_kvevict.segments.collectors import COLLECTORS, Chunk, Collector


class Observation(Protocol):
    """Signals of a range by which a policy orders it."""

    @property
    def goes_on(self) -> bool:
        """Whether the range is a chunk of a prompt of which more will be computed."""

    def show(self, layer: int, start: int, k_buffer: Tensor, v_buffer: Tensor, token_slots: Tensor) -> LayerView:
        """The view of one layer of the tokens in ``token_slots``, from logical position ``start`` on."""


class Recorder(Protocol):
    """Gets the queries of a prefill, layer by layer; ``has_failed``: after an error it is not to be used."""

    has_failed: bool

    def record(self, layer: int, queries: Tensor, lse: Tensor, k_buffer: Tensor, sm_scale: float, /) -> None:
        """Use one layer of the chunk; arguments as in :class:`Chunk`."""


@dataclass(frozen=True)
class ObservationSpec:
    """Signals to collect; ``window_size`` limits the window signals."""

    geometry: KVGeometry
    signals: frozenset[Signal]
    window_size: int = 0

    @cached_property
    def collectors(self) -> dict[Signal, type[Collector]]:
        """The signals' collectors, in a fixed order."""
        return {signal: kind for signal, kind in COLLECTORS.items() if signal in self.signals}

    @cached_property
    def needs_slots(self) -> bool:
        """Whether a collector needs the token slots of the keys."""
        return any(kind.needs_slots for kind in self.collectors.values())


class PromptObservation:
    """Signals of one prompt, collected over any number of chunks.

    Only queries of this prefill are observed, not those of cached tokens. Layers with a sliding window are skipped:
    they keep entries by position.

    Attributes:
        first_query: logical position of the first query; tokens before it were cached.
        end: logical position after the last query.
        has_failed: an error made the observation unusable.
    """

    def __init__(self, spec: ObservationSpec) -> None:
        self.spec = spec
        self.first_query = 0
        self.end = 0
        self.has_failed = False
        self._is_last = False
        self._chunk_start = 0
        self._key_start = 0
        self._token_slots: Tensor | None = None
        self._layers: list[dict[Signal, Collector]] = []
        self._sm_scales = [0.0] * spec.geometry.num_layers

    @property
    def is_complete(self) -> bool:
        """Whether the prompt was observed to its end without an error."""
        return self._is_last and not self.has_failed

    @property
    def goes_on(self) -> bool:
        """Whether more of the prompt will be computed."""
        return not self.is_complete

    @property
    def num_bytes(self) -> int:
        """Memory that counts towards ``observation_bytes``."""
        return sum(collector.num_bytes for layer in self._layers for collector in layer.values())

    def begin_chunk(
        self, start: int, end: int, *, is_last: bool, key_start: int = 0, token_slots: Tensor | None = None
    ) -> None:
        """Announce the queries ``[start, end)``, which :meth:`record` then gets layer by layer.

        The observation restarts if ``start`` is not the last chunk's end, or ``key_start``, the compressed length, is
        below the last chunk's. Per-token data of tokens compressed since the last chunk is dropped. ``is_last``: the
        prompt ends here. ``token_slots``, [end - key_start], int64, are required if ``spec.needs_slots``.
        """
        # A request that was retracted, or lost a part of its prefix, is prefilled again: what was summed up would count
        # twice.
        if start != self.end or key_start < self._key_start or not self._layers:
            kinds, geometry = self.spec.collectors, self.spec.geometry
            self._layers = [
                {} if geometry.window(layer) else {signal: kind() for signal, kind in kinds.items()}
                for layer in range(geometry.num_layers)
            ]
            self.first_query = start
        elif key_start > self._key_start:
            for layer in self._layers:
                for collector in layer.values():
                    collector.forget(key_start - self._key_start)
        self._key_start = key_start
        self._chunk_start = start
        self._token_slots = token_slots
        self.end = end
        self._is_last = is_last

    def record(self, layer: int, queries: Tensor, lse: Tensor, k_buffer: Tensor, sm_scale: float) -> None:
        """Collect from one layer of the chunk; arguments as in :class:`Chunk`."""
        self._sm_scales[layer] = sm_scale
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
        )
        for collector in self._layers[layer].values():
            collector.add(chunk)

    def show(self, layer: int, start: int, k_buffer: Tensor, v_buffer: Tensor, token_slots: Tensor) -> LayerView:
        """The :class:`LayerView` of a range in one layer."""
        first, num_tokens = start - self._key_start, token_slots.numel()
        collectors = self._layers[layer].items()
        signals = {signal: value for signal, one in collectors if (value := one.value(first, num_tokens)) is not None}
        k_scale, v_scale = self.spec.geometry.scales.of(layer)
        return LayerView(
            layer=layer,
            start=start,
            k_buffer=k_buffer,
            v_buffer=v_buffer,
            token_slots=token_slots,
            sm_scale=self._sm_scales[layer],
            signals=signals,
            num_prompt_tokens=self.end,
            k_scale=k_scale,
            v_scale=v_scale,
        )


@dataclass(frozen=True)
class CacheObservation:
    """Observation without signals: a range is scored from its cached keys and values alone."""

    goes_on: bool = False

    def show(self, layer: int, start: int, k_buffer: Tensor, v_buffer: Tensor, token_slots: Tensor) -> LayerView:
        """The view of a range in one layer, without signals."""
        return LayerView(layer, start, k_buffer, v_buffer, token_slots, sm_scale=0.0)
