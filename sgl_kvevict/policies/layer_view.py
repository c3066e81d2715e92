"""Layer view: keys, values and signals of one layer of a range, for a policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from torch import Tensor

from kvevict_kernels.stored_rows import gather_rows
from sgl_kvevict.policies.signals import QueryWindow, Signal

ValueT = TypeVar("ValueT")


@dataclass(frozen=True)
class LayerView:
    """One layer of the tokens ``[start, start + num_tokens)`` of a path (logical positions).

    Attributes:
        k_buffer: [num_token_slots, num_kv_heads, head_dim], the layer's keys, after RoPE.
        v_buffer: [num_token_slots, num_kv_heads, head_dim].
        token_slots: [num_tokens], int64, the range's rows in the buffers.
        sm_scale: softmax scale, for products of queries and ``keys``.
        signals: see :class:`Signal`; signals per token are [num_kv_heads, num_tokens], float32.
        num_prompt_tokens: logical length of the observed prompt; None if unknown.
        k_scale: FP8 scale of ``k_buffer``; 1.0 for other dtypes. ``v_scale`` likewise.
    """

    layer: int
    start: int
    k_buffer: Tensor
    v_buffer: Tensor
    token_slots: Tensor
    sm_scale: float
    signals: Mapping[Signal, object] = field(default_factory=dict)
    num_prompt_tokens: int | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0

    @property
    def keys(self) -> Tensor:
        """[num_tokens, num_kv_heads, head_dim]; copied at each use, so that memory holds one layer at a time."""
        return gather_rows(self.k_buffer, self.token_slots, self.k_scale)

    @property
    def values(self) -> Tensor:
        """[num_tokens, num_kv_heads, head_dim]; copied at each use."""
        return gather_rows(self.v_buffer, self.token_slots, self.v_scale)

    @property
    def num_tokens(self) -> int:
        """Tokens in the range."""
        return self.token_slots.shape[0]

    @property
    def num_kv_heads(self) -> int:
        """KV heads of the layer."""
        return self.k_buffer.shape[1]

    def with_signals(self, more: Mapping[Signal, object]) -> LayerView:
        """The same view with more signals."""
        return replace(self, signals={**self.signals, **more})

    def find(self, signal: Signal, kind: type[ValueT]) -> ValueT | None:
        """A signal of type ``kind``, or None if it was not collected; ValueError if it is of another type."""
        value = self.signals.get(signal)
        if value is None or isinstance(value, kind):
            return value
        raise ValueError(f"{signal.value} of layer {self.layer}: a {kind.__name__} is needed, got {type(value)}")

    def need(self, signal: Signal, kind: type[ValueT]) -> ValueT:
        """A signal of type ``kind``; ValueError if it was not collected or is of another type."""
        value = self.find(signal, kind)
        if value is None:
            raise ValueError(f"the policy needs {signal.value} of layer {self.layer}, got none")
        return value

    def need_per_token(self, signal: Signal) -> Tensor:
        """[num_kv_heads, num_tokens], float32, a signal per token; ValueError if missing or of another shape."""
        value = self.need(signal, Tensor)
        expected = (self.num_kv_heads, self.num_tokens)
        if tuple(value.shape) != expected:
            got = tuple(value.shape)
            raise ValueError(f"the policy needs {signal.value} {expected} of layer {self.layer}, got {got}")
        return value

    def need_window(self) -> QueryWindow:
        """The last queries of the prompt; ValueError if they were not collected."""
        return self.need(Signal.WINDOW_QUERIES, QueryWindow)

    def attention_of(self, window: QueryWindow) -> dict[str, Any]:
        """Arguments of :mod:`kvevict_kernels.key_scores` for the attention that a window's queries pay the range."""
        return {
            **{"queries": window.queries, "lse": window.lse, "query_start": window.start},
            **{"k_buffer": self.k_buffer, "token_slots": self.token_slots, "key_start": self.start},
            "sm_scale": self.sm_scale * self.k_scale,  # of products with stored rows
        }


Show = Callable[[int], LayerView]
"""Gives the view of a layer."""
