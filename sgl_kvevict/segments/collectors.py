"""Collectors: gather signals during a prefill; one class per signal, one object per layer.

A collector holds at most a few numbers per token, never attention rows. Its size is constant, or counted in
``num_bytes`` and so limited by ``observation_bytes``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvevict_kernels.key_scores import accumulated_attention
from kvevict_kernels.stored_rows import gather_rows
from sgl_kvevict.policies.signals import QueryWindow, Signal


@dataclass(frozen=True)
class Chunk:
    """Consecutive queries of one prompt in one layer, and the keys they saw.

    Attributes:
        queries: [n, num_qo_heads, head_dim], after RoPE.
        lse: [n, num_qo_heads], float32, natural log-sum-exp over all keys the query saw.
        query_start: logical position of the first query.
        k_buffer: [num_token_slots, num_kv_heads, head_dim], the layer's keys, including the chunk's.
        key_start: number of compressed tokens; keys from this logical position on are in ordinary slots.
        token_slots: [num_keys], int64, slots of the tokens from ``key_start`` to the last query's; None if unused.
        sm_scale: softmax scale of the layer.
        k_scale: FP8 scale of ``k_buffer``; 1.0 for other dtypes.
        window_size: maximum number of queries to keep.
    """

    queries: Tensor
    lse: Tensor
    query_start: int
    k_buffer: Tensor
    key_start: int
    token_slots: Tensor | None
    sm_scale: float
    k_scale: float
    window_size: int

    @property
    def key_slots(self) -> Tensor:
        """``token_slots``, for a collector whose ``needs_slots`` is set."""
        assert self.token_slots is not None
        return self.token_slots

    def last(self, earlier: Tensor | None, rows: Tensor) -> Tensor:
        """The last ``window_size`` of the earlier rows and this chunk's; contiguous."""
        missing = self.window_size - rows.shape[0]
        if earlier is None or missing <= 0:
            # A copy: a view would keep the queries of the whole forward in memory.
            return rows[-self.window_size :].clone(memory_format=torch.contiguous_format)
        return torch.cat([earlier[-missing:], rows]).contiguous()


class Collector(ABC):
    """Collects one signal in one layer, chunk after chunk."""

    needs_slots: ClassVar[bool] = False
    """Whether :attr:`Chunk.token_slots` is required."""

    @property
    def num_bytes(self) -> int:
        """Memory that is limited for all open ranges together: that of tensors among the attributes."""
        return sum(part.nbytes for part in vars(self).values() if isinstance(part, Tensor))

    @abstractmethod
    def add(self, chunk: Chunk) -> None:
        """Collect from the next chunk."""

    @abstractmethod
    def value(self, first: int, num_tokens: int) -> object | None:
        """The signal of ``num_tokens`` tokens (see :class:`Signal`); None before the first chunk.

        ``first`` is the index of the range's first token among the keys of the last chunk.
        """

    def forget(self, num_tokens: int) -> None:
        """Drop the per-token data of the first ``num_tokens`` keys, which were compressed."""
        return None


class WindowQueries(Collector):
    """The last queries and their log-sum-exp; scores are computed when the range to compress is known."""

    def __init__(self) -> None:
        self._queries: Tensor | None = None
        self._lse: Tensor | None = None
        self._end = 0

    def add(self, chunk: Chunk) -> None:
        """Keep the last rows."""
        self._queries = chunk.last(self._queries, chunk.queries)
        self._lse = chunk.last(self._lse, chunk.lse)
        self._end = chunk.query_start + chunk.queries.shape[0]

    def value(self, first: int, num_tokens: int) -> QueryWindow | None:
        """The window; independent of the range."""
        if self._queries is None or self._lse is None:
            return None
        return QueryWindow(self._queries, self._lse, self._end - self._queries.shape[0])


class WindowKeys(Collector):
    """The keys of the tokens whose queries :class:`WindowQueries` keeps."""

    needs_slots = True

    def __init__(self) -> None:
        self._keys: Tensor | None = None

    def add(self, chunk: Chunk) -> None:
        """Keep the last rows."""
        # The last keys are those of the chunk's own queries.
        slots = chunk.key_slots[-chunk.queries.shape[0] :][-chunk.window_size :]
        self._keys = chunk.last(self._keys, gather_rows(chunk.k_buffer, slots, chunk.k_scale))

    def value(self, first: int, num_tokens: int) -> Tensor | None:
        """The keys; independent of the range."""
        return self._keys


class AccumulatedAttention(Collector):
    """Attention of all queries, summed: one number per key."""

    needs_slots = True

    def __init__(self) -> None:
        self._numbers: Tensor | None = None

    def add(self, chunk: Chunk) -> None:
        """Add the chunk's numbers to those of earlier chunks."""
        numbers = accumulated_attention(
            chunk.queries.contiguous(),
            chunk.lse.contiguous(),
            chunk.k_buffer,
            chunk.key_slots,
            sm_scale=chunk.sm_scale * chunk.k_scale,
            key_start=chunk.key_start,
            query_start=chunk.query_start,
        )
        if self._numbers is not None:
            # Earlier chunks have numbers of fewer keys: those of this chunk come behind.
            numbers[:, : self._numbers.shape[1]].add_(self._numbers)
        self._numbers = numbers

    def value(self, first: int, num_tokens: int) -> Tensor | None:
        """[num_kv_heads, num_tokens], float32."""
        return None if self._numbers is None else self._numbers[:, first : first + num_tokens]

    def forget(self, num_tokens: int) -> None:
        """Drop the first tokens' numbers."""
        if self._numbers is not None:
            self._numbers = self._numbers[:, num_tokens:]


COLLECTORS: Mapping[Signal, type[Collector]] = {
    Signal.WINDOW_QUERIES: WindowQueries,
    Signal.WINDOW_KEYS: WindowKeys,
    Signal.ACCUMULATED_ATTENTION: AccumulatedAttention,
}
"""Collectors of the signals of a prefill. Other signals come from the pool or from readers."""
