"""What a prefill leaves behind for the policy: a few numbers per token, never attention rows."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvevict_kernels.accumulated_attention import accumulated_attention
from kvevict_kernels.stored_rows import gather_rows
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.policies.echo import echo_attention
from sgl_kvevict.policies.observation import LayerObservation, QueryWindow, Signal
from sgl_kvevict.policies.query_moments import QueryMoments
from sgl_kvevict.policies.rotary import Rotary

_BY_SLOTS = {Signal.WINDOW_KEYS, Signal.ACCUMULATED_ATTENTION, Signal.ECHO_ATTENTION}
_COLLECTED = {Signal.WINDOW_QUERIES, Signal.QUERY_MOMENTS} | _BY_SLOTS


@dataclass(frozen=True)
class ObservationSpec:
    """What the policy wants to know of a prefill.

    Attributes:
        geometry: sizes of the model.
        signals: what to collect.
        window_size: queries to keep for :attr:`Signal.WINDOW_QUERIES`, at most; keys for :attr:`Signal.WINDOW_KEYS`.
        rotary: the model's rotary embedding, for :attr:`Signal.QUERY_MOMENTS` and :attr:`Signal.ECHO_ATTENTION`.
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

    sm_scale: float = 0.0
    queries: Tensor | None = None
    lse: Tensor | None = None
    window_keys: Tensor | None = None
    accumulated: Tensor | None = None
    echo: Tensor | None = None
    moments: QueryMoments | None = None

    def forget(self, num_tokens: int) -> None:
        """The first tokens were compressed."""
        if self.accumulated is not None:
            self.accumulated = self.accumulated[:, num_tokens:]
        if self.echo is not None:
            self.echo = self.echo[:, num_tokens:]


class PromptObservation:
    """What was seen of one prompt, layer by layer, while its prefill ran over any number of chunks.

    The window's queries are kept instead of their scores: they are a constant few rows per layer, they can still be
    scored when the range to compress is known (it may have shrunk since, or may be compressed much later), and the
    log-sum-exp that the forward computed anyway makes the scores true attention weights while the keys are read
    once. Statistics over all queries are summed up chunk by chunk. Only queries that this prefill computed count: those
    of tokens that were found in the cache are gone.

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
        return bool(self.spec.signals & _BY_SLOTS)

    @property
    def records(self) -> bool:
        """Whether :meth:`record` collects anything."""
        return bool(self.spec.signals & _COLLECTED)

    @property
    def num_bytes(self) -> int:
        """Memory of what was recorded, without the moments of queries, which do not grow with the prompt."""
        held = (tensor for seen in self._layers for tensor in (seen.queries, seen.lse, seen.accumulated, seen.echo))
        return sum(tensor.nbytes for tensor in held if tensor is not None)

    @property
    def has_echo(self) -> bool:
        """Echo attention was collected: what is compressed needs no other scores."""
        return Signal.ECHO_ATTENTION in self.spec.signals

    def without_echo(self) -> PromptObservation:
        """A copy for those who do not look at echo attention, which grows with the prompt."""
        other = copy(self)
        other.spec = replace(self.spec, signals=self.spec.signals - {Signal.ECHO_ATTENTION})
        other._layers = [replace(seen, echo=None) for seen in self._layers]
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
            self._layers = [_Layer() for _ in range(self.spec.geometry.num_layers)]
            self.first_query = start
        elif key_start > self._key_start:
            for seen in self._layers:
                seen.forget(key_start - self._key_start)
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
        k_scale = self.spec.geometry.scales.of(layer)[0]
        if Signal.WINDOW_QUERIES in self.spec.signals:
            seen.queries = self._last(seen.queries, queries)
            seen.lse = self._last(seen.lse, lse)
        if Signal.WINDOW_KEYS in self.spec.signals:
            assert self._token_slots is not None
            slots = self._token_slots[-queries.shape[0] :][-self.spec.window_size :]
            seen.window_keys = self._last(seen.window_keys, gather_rows(k_buffer, slots, k_scale))
        if Signal.ACCUMULATED_ATTENTION in self.spec.signals:
            seen.accumulated = self._accumulate(seen.accumulated, queries, lse, k_buffer, sm_scale * k_scale)
        if Signal.ECHO_ATTENTION in self.spec.signals:
            seen.echo = self._echo(seen.echo, queries, k_buffer, sm_scale, k_scale)
        if Signal.QUERY_MOMENTS in self.spec.signals:
            assert self.spec.rotary is not None
            _, num_qo_heads, head_dim = queries.shape
            moments = seen.moments or QueryMoments.empty(num_qo_heads, head_dim, self.spec.rotary)
            seen.moments = moments.add(queries, self._chunk_start)

    def show(self, layer: int, start: int, k_buffer: Tensor, v_buffer: Tensor, token_slots: Tensor) -> LayerObservation:
        """Return what a policy sees of a range in one layer.

        Args:
            layer: layer index.
            start: logical position of the range's first token.
            k_buffer: [num_token_slots, num_kv_heads, head_dim].
            v_buffer: likewise.
            token_slots: [num_tokens], int64, slots of the range.
        """
        seen = self._layers[layer]
        window = None
        if seen.queries is not None and seen.lse is not None:
            window = QueryWindow(seen.queries, seen.lse, self.end - seen.queries.shape[0], seen.window_keys)
        first = start - self._key_start
        k_scale, v_scale = self.spec.geometry.scales.of(layer)
        accumulated, echo = (
            None if signal is None else signal[:, first : first + token_slots.numel()]
            for signal in (seen.accumulated, seen.echo)
        )
        return LayerObservation(
            layer=layer,
            start=start,
            k_buffer=k_buffer,
            v_buffer=v_buffer,
            token_slots=token_slots,
            sm_scale=seen.sm_scale,
            window=window,
            accumulated=accumulated,
            echo=echo,
            output_gram=None if self.spec.output_grams is None else self.spec.output_grams[layer],
            moments=seen.moments,
            num_prompt_tokens=self.end,
            k_scale=k_scale,
            v_scale=v_scale,
        )

    def _last(self, earlier: Tensor | None, rows: Tensor) -> Tensor:
        missing = self.spec.window_size - rows.shape[0]
        if earlier is None or missing <= 0:
            return rows[-self.spec.window_size :].clone(memory_format=torch.contiguous_format)
        return torch.cat([earlier[-missing:], rows]).contiguous()

    def _accumulate(
        self, earlier: Tensor | None, queries: Tensor, lse: Tensor, k_buffer: Tensor, stored_sm_scale: float
    ) -> Tensor:
        assert self._token_slots is not None
        total = accumulated_attention(
            queries.contiguous(),
            lse.contiguous(),
            k_buffer,
            self._token_slots,
            sm_scale=stored_sm_scale,
            key_start=self._key_start,
            query_start=self._chunk_start,
        )
        if earlier is not None:
            total[:, : earlier.shape[1]] += earlier
        return total

    def _echo(
        self, earlier: Tensor | None, queries: Tensor, k_buffer: Tensor, sm_scale: float, k_scale: float
    ) -> Tensor:
        assert self._token_slots is not None and self.spec.rotary is not None
        peaks = echo_attention(
            queries,
            k_buffer,
            self._token_slots,
            sm_scale=sm_scale,
            key_start=self._key_start,
            query_start=self._chunk_start,
            rotary=self.spec.rotary,
            k_scale=k_scale,
        )
        if earlier is not None:
            seen = peaks[:, : earlier.shape[1]]
            torch.maximum(seen, earlier, out=seen)
        return peaks


class CacheObservation:
    """Nothing was seen, or nothing is left of it: what the cache holds of a range has to do."""

    num_bytes = 0

    def show(self, layer: int, start: int, k_buffer: Tensor, v_buffer: Tensor, token_slots: Tensor) -> LayerObservation:
        """Return keys and values of a range in one layer; see :meth:`PromptObservation.show`."""
        return LayerObservation(layer, start, k_buffer, v_buffer, token_slots, sm_scale=0.0)
