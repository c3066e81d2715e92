"""Attention on a CPU in one compiled call for a layer; long prefills go through PyTorch."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from kvevict_kernels.span_attention import Layout, SpanAttention
from sgl_kvevict.attention.batch import AttentionBatch, Path
from sgl_kvevict.attention.cpu.torch_extend import ExtendAttention, ExtendRequest, RunBounds, plan_extend
from sgl_kvevict.attention.recent_batches import RecentBatches
from sgl_kvevict.errors import InvariantError
from sgl_kvevict.geometry import KVGeometry

MAX_SHORT_TOKENS = 256
"""Requests with up to so many new tokens take the compiled call.

Measured with AVX-512: half of PyTorch's time, from 16 to 256 tokens on 600 and on 2,600 entries a head. Longer
prefills are large matrix products, for which PyTorch has the processor's own instructions (AMX), and the partial
results of the call would take much memory.
"""

_Key = tuple[tuple[Path, ...], tuple[int, ...], tuple[int, ...]]
"""Paths, numbers of new tokens and places of the first of them."""


class NumbaAttention:
    """Attention of new tokens over compressed spans (other keys per KV head) and uncompressed token slots.

    What a request gets does not depend on the other requests of the batch.

    Args:
        geometry: sizes.
        k_arena: [num_layers, num_token_slots, num_kv_heads, head_dim], contiguous.
        v_arena: like ``k_arena``.
        biases: [num_layers, num_token_slots, num_kv_heads], float32, added to the scores of entries of fitted spans, 0
            for those of others; None: no span is ever fitted.

    Raises:
        ValueError: wrong shape, dtype or device of an arena.
        RuntimeError: this machine cannot run it (``span_attention.reason_not_to_run``).
    """

    def __init__(self, geometry: KVGeometry, k_arena: Tensor, v_arena: Tensor, biases: Tensor | None = None) -> None:
        self.geometry = geometry
        self._spans = SpanAttention(k_arena, v_arena, geometry.num_qo_heads, biases)
        self._extend = ExtendAttention(k_arena, v_arena, RunBounds(), biases, geometry.windows)
        self._recent: RecentBatches[_Key, Layout] = RecentBatches()
        self._layout: Layout | None = None
        self._long: list[ExtendRequest] = []
        self._num_new = -1

    def plan(self, batch: AttentionBatch) -> None:
        """Prepare the layers of one forward.

        Which tokens read which spans is kept over forwards, until other requests or other spans are read; a step adds
        where the suffixes are.

        Args:
            batch: the requests of the forward.
        """
        new_lens = batch.new_lens
        self._num_new = sum(new_lens)
        self._long = plan_extend(batch, [i for i, new in enumerate(new_lens) if new > MAX_SHORT_TOKENS])
        short = [i for i, new in enumerate(new_lens) if new <= MAX_SHORT_TOKENS]
        self._layout = self._lay_out(batch, new_lens, short) if short else None

    def run(self, layer: int, q: Tensor, sm_scale: float, sink_logits: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Attend as planned; see :meth:`sgl_kvevict.attention.interface.Attention.run`."""
        shape = (self._num_new, self.geometry.num_qo_heads, self.geometry.head_dim)
        if tuple(q.shape) != shape:
            raise InvariantError(f"q: planned {list(shape)}, got {list(q.shape)}")
        if sink_logits is not None:
            sink_logits = sink_logits.float().contiguous()
        if self._layout is None and len(self._long) == 1:
            return self._extend.run(self._long[0], layer, q, sm_scale, sink_logits)
        out = torch.empty(shape, dtype=q.dtype)
        lse = torch.empty(shape[:2], dtype=torch.float32)
        for request in self._long:
            rows = request.rows
            out[rows], lse[rows] = self._extend.run(request, layer, q[rows], sm_scale, sink_logits)
        if self._layout is not None:
            window = self.geometry.window(layer)
            self._spans.run(self._layout, layer, q, sm_scale, out, lse, window=window, sink_logits=sink_logits)
        return out, lse

    def _lay_out(self, batch: AttentionBatch, new_lens: list[int], requests: list[int]) -> Layout:
        paths = tuple(batch.paths[i] for i in requests)
        short_lens = tuple(new_lens[i] for i in requests)
        ends = list(accumulate(new_lens))
        first_tokens = tuple(ends[i] - new_lens[i] for i in requests)
        layout = self._recent.get(
            (paths, short_lens, first_tokens),
            lambda: self._spans.lay_out(paths, short_lens, first_tokens, has_windows=self.geometry.has_windows),
        )
        layout.locate(
            [batch.waterlines[i] for i in requests],
            [batch.seq_lens[i] for i in requests],
            batch.req_pool_indices[requests],
            batch.req_to_token,
        )
        self._spans.prepare(layout)
        return layout
