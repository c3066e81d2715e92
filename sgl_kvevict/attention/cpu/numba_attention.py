"""Attention on a CPU: one call per layer, compiled by numba; long prefills use PyTorch's flash attention."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from kvevict_kernels.row_codec import RowCoding
from kvevict_kernels.span_attention import Layout, SpanAttention
from kvevict_kernels.span_attention.layout import count_chunks
from sgl_kvevict.attention.batch import AttentionBatch, BatchKey, Path, RecentBatches, require_widths
from sgl_kvevict.attention.cpu.long_prefill import LongPrefill, PrefillRequest
from sgl_kvevict.errors import InvariantError
from sgl_kvevict.geometry import KVGeometry

MAX_SHORT_TOKENS = 256
"""Requests with up to this many new tokens use the compiled call.

Measured with AVX-512: half of PyTorch's time, from 16 to 256 tokens on 600 and on 2,600 entries per head. Longer
prefills are large matrix products, for which PyTorch uses AMX, and their partial results would take much memory.
"""
MAX_PARTIAL_BYTES = 2**28
"""Of the partial results that a request of several new tokens may have of its spans; with more it counts as long. The
call has up to 16 for each span, query head and new token: of 256 tokens behind fifty turns 1.4 GB, with 32 heads."""


class NumbaAttention:
    """Attention compiled by numba. A request's result does not depend on the other requests of the batch.

    Arguments as for :func:`sgl_kvevict.attention.backend.build_attention`. RuntimeError: this machine cannot run it
    (``span_attention.reason_not_to_run``).
    """

    def __init__(self, geometry: KVGeometry, k_arena: Tensor, v_arena: Tensor, coding: RowCoding | None = None) -> None:
        self.geometry = geometry
        self._has_coding = coding is not None
        self._spans = SpanAttention(k_arena, v_arena, geometry.num_qo_heads, coding)
        self._prefill = LongPrefill(k_arena, v_arena, geometry.windows, coding)
        self._recent: RecentBatches[BatchKey, Layout] = RecentBatches()
        self._layout: Layout | None = None
        self._long: list[PrefillRequest] = []
        self._num_new = -1

    def plan(self, batch: AttentionBatch) -> None:
        """Prepare the layers of one forward.

        The layout of spans is kept until other requests or spans are read; a step only adds the places of the suffixes.
        """
        require_widths(batch.paths, has_coding=self._has_coding)
        new_lens = batch.new_lens
        self._num_new = sum(new_lens)
        is_short = [
            batch.visible is not None or self._is_short(path, new)
            for path, new in zip(batch.paths, new_lens, strict=True)
        ]
        self._long = self._prefill.plan(batch, [i for i, each in enumerate(is_short) if not each])
        short = [i for i, each in enumerate(is_short) if each]
        self._layout = self._lay_out(batch, new_lens, short) if short else None

    def _is_short(self, path: Path, num_new: int) -> bool:
        """Whether the compiled call attends for a request: from its path and new tokens alone, as layouts are kept."""
        if num_new == 1 or num_new > MAX_SHORT_TOKENS:
            return num_new == 1
        row_bytes = 4 * self.geometry.num_qo_heads * self.geometry.v_head_dim
        # No run is longer than its span has tokens.
        num_partials = int(count_chunks(np.array([span.num_tokens for span in path], np.int64)).sum())
        return num_partials * num_new * row_bytes <= MAX_PARTIAL_BYTES

    def run(self, layer: int, q: Tensor, sm_scale: float, sink_logits: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Attend as planned."""
        shape = (self._num_new, self.geometry.num_qo_heads, self.geometry.head_dim)
        if tuple(q.shape) != shape:
            raise InvariantError(f"q: planned {list(shape)}, got {list(q.shape)}")
        if sink_logits is not None:
            sink_logits = sink_logits.float().contiguous()
        # A prompt alone in its forward: its result is the whole result, without a copy.
        if self._layout is None and len(self._long) == 1:
            return self._prefill.run(self._long[0], layer, q, sm_scale, sink_logits)
        out = q.new_empty(*shape[:2], self.geometry.v_head_dim)
        lse = torch.empty(shape[:2], dtype=torch.float32)
        for request in self._long:
            rows = request.rows
            out[rows], lse[rows] = self._prefill.run(request, layer, q[rows], sm_scale, sink_logits)
        if self._layout is not None:
            window = self.geometry.window(layer)
            self._spans.run(self._layout, layer, q, sm_scale, out, lse, window=window, sink_logits=sink_logits)
        return out, lse

    def _lay_out(self, batch: AttentionBatch, new_lens: list[int], requests: list[int]) -> Layout:
        # The key has no lengths: they change with every step, and are set below.
        layout = self._recent.get(batch.key, lambda: self._build(batch, new_lens, requests))
        layout.locate(
            [batch.compressed_lens[i] for i in requests],
            [batch.seq_lens[i] for i in requests],
            batch.req_pool_indices[requests],
            batch.req_to_token,
            batch.visible,
        )
        self._spans.prepare(layout)
        return layout

    def _build(self, batch: AttentionBatch, new_lens: list[int], requests: list[int]) -> Layout:
        ends = list(accumulate(new_lens))
        return self._spans.lay_out(
            [batch.paths[i] for i in requests],
            [new_lens[i] for i in requests],
            [ends[i] - new_lens[i] for i in requests],
            has_windows=self.geometry.has_windows,
        )
