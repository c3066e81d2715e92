"""Query lanes: device buffers with the last queries of requests that generate."""

from __future__ import annotations

import torch
from torch import Tensor

from kvevict_kernels.transfer import to_device
from sgl_kvevict.geometry import KVGeometry


class QueryLanes:
    """One lane per request: a ring buffer of the last ``depth`` queries in each layer.

    All lanes together take at most ``max_bytes``, but at least one exists; ``element_size`` is bytes per query element.
    """

    def __init__(self, geometry: KVGeometry, depth: int, max_bytes: int, element_size: int) -> None:
        self.depth = depth
        row_bytes = geometry.num_layers * geometry.num_qo_heads * (geometry.head_dim * element_size + 4)
        self._max_lanes = max(max_bytes // (row_bytes * depth), 1)
        self._free: list[int] = []
        self._num_lanes = 0
        self._queries: list[Tensor | None] = [None] * geometry.num_layers
        self._lse: list[Tensor | None] = [None] * geometry.num_layers
        self._scales = [0.0] * geometry.num_layers

    @property
    def num_bytes(self) -> int:
        """Memory of the lanes."""
        return sum(part.nbytes for part in (*self._queries, *self._lse) if part is not None)

    def take(self) -> int | None:
        """A free lane, or None."""
        if self._free:
            return self._free.pop()
        if self._num_lanes == self._max_lanes:
            return None
        self._num_lanes += 1
        return self._num_lanes - 1

    def give_back(self, lane: int) -> None:
        """Release a lane."""
        self._free.append(lane)

    def places(self, lanes: list[int], positions: list[int], device: torch.device) -> Tensor:
        """[n], int64: buffer rows of queries, by lane and logical position."""
        places = [lane * self.depth + position % self.depth for lane, position in zip(lanes, positions, strict=True)]
        return to_device(torch.tensor(places, dtype=torch.int64), device)

    def record(self, layer: int, places: Tensor, queries: Tensor, lse: Tensor, sm_scale: float) -> None:
        """Store queries [n, num_qo_heads, head_dim] and log-sum-exps [n, num_qo_heads] of one layer at ``places``."""
        self._scales[layer] = sm_scale
        self._queries[layer] = self._with_room(self._queries[layer], queries)
        self._lse[layer] = self._with_room(self._lse[layer], lse)
        for kept, rows in ((self._queries[layer], queries), (self._lse[layer], lse)):
            assert kept is not None
            kept.index_copy_(0, places, rows)

    def rows(self, layer: int, places: Tensor) -> tuple[Tensor, Tensor, float]:
        """Queries [n, num_qo_heads, head_dim], their log-sum-exp [n, num_qo_heads], and the layer's softmax scale."""
        queries, lse = self._queries[layer], self._lse[layer]
        assert queries is not None and lse is not None
        return queries.index_select(0, places), lse.index_select(0, places), self._scales[layer]

    def _with_room(self, kept: Tensor | None, rows: Tensor) -> Tensor:
        """The buffer ``kept``, with room for all lanes in use; if it grows, it doubles, so that it seldom does."""
        num_rows, held = self._num_lanes * self.depth, 0 if kept is None else kept.shape[0]
        if kept is not None and held >= num_rows:
            return kept
        grown = rows.new_zeros(max(num_rows, min(2 * held, self._max_lanes * self.depth)), *rows.shape[1:])
        if kept is not None:
            grown[:held] = kept
        return grown
