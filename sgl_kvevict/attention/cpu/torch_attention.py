"""The CPU attention backend: plan once per forward, run once per layer."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from kvevict_kernels.checks import KV_DTYPES, check_arenas
from kvevict_kernels.ragged_attention.cpu import Scratch
from sgl_kvevict.attention.batch import AttentionBatch, Path
from sgl_kvevict.attention.cpu.torch_decode import ArenaViews, TileStep
from sgl_kvevict.attention.cpu.torch_extend import ExtendAttention, ExtendRequest, RunBounds, plan_extend
from sgl_kvevict.attention.cpu.torch_rows import RowStep
from sgl_kvevict.attention.cpu.torch_tiles import SpanTiles, locate_suffixes
from sgl_kvevict.attention.recent_batches import RecentBatches
from sgl_kvevict.attention.sink_logits import with_sink_logits
from sgl_kvevict.errors import InvariantError
from sgl_kvevict.geometry import KVGeometry


class TorchAttention:
    """Attention of new tokens over compressed spans (other keys per KV head) and uncompressed token slots.

    Requests with one new token go through the batched decode path, also inside of a prefill step; spans that
    several of them share are read once for all. Layers with a window take the requests one by one.

    Args:
        geometry: sizes.
        k_arena: [num_layers, num_token_slots, num_kv_heads, head_dim], contiguous.
        v_arena: like ``k_arena``.
        biases: [num_layers, num_token_slots, num_kv_heads], float32, added to the scores of entries of fitted spans, 0
            for those of others; None: no span is ever fitted.

    Raises:
        ValueError: wrong shape, dtype or device of an arena.
    """

    def __init__(self, geometry: KVGeometry, k_arena: Tensor, v_arena: Tensor, biases: Tensor | None = None) -> None:
        check_arenas(k_arena, v_arena, biases, geometry.arena_shape, KV_DTYPES, torch.device("cpu"))
        self.geometry = geometry
        self.k_arena = k_arena
        self.v_arena = v_arena
        self.biases = biases
        self._views = ArenaViews(k_arena, v_arena)
        self._scratch = Scratch()
        self._recent: RecentBatches[tuple[Path, ...], SpanTiles] = RecentBatches()
        self._extend = ExtendAttention(k_arena, v_arena, RunBounds(), biases, geometry.windows)
        self._decode_step: TileStep | RowStep | None = None
        self._decode_rows: Tensor | None = None
        self._extending: list[ExtendRequest] = []
        self._in_windows: list[ExtendRequest] = []
        self._num_new = -1

    def plan(self, batch: AttentionBatch) -> None:
        """Prepare the layers of one forward.

        What concerns spans is kept over forwards, until other requests or other spans are read; a step adds the
        look-up of the suffixes' token slots.

        Args:
            batch: the requests of the forward.
        """
        new_lens = batch.new_lens
        self._num_new = sum(new_lens)
        several = [i for i, new in enumerate(new_lens) if new > 1]
        if self.geometry.has_windows:
            self._in_windows = plan_extend(batch, list(range(len(new_lens))))
            self._extending = [self._in_windows[i] for i in several]
        else:
            self._extending = plan_extend(batch, several)
        single = [i for i, new in enumerate(new_lens) if new == 1] if self.geometry.full_layers else []
        self._decode_step = self._plan_decode(batch, single) if single else None
        self._decode_rows = None
        if self._decode_step is not None and self._extending:
            ends = list(accumulate(new_lens))
            self._decode_rows = torch.tensor([ends[i] - 1 for i in single])

    def run(self, layer: int, q: Tensor, sm_scale: float, sink_logits: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Attend as planned; see :meth:`sgl_kvevict.attention.interface.Attention.run`."""
        shape = (self._num_new, self.geometry.num_qo_heads, self.geometry.head_dim)
        if tuple(q.shape) != shape:
            raise InvariantError(f"q: planned {list(shape)}, got {list(q.shape)}")
        has_window = self.geometry.window(layer) > 0
        step = None if has_window else self._decode_step
        if step is not None and self._decode_rows is None:
            return with_sink_logits(*step.run(layer, q, sm_scale), sink_logits)
        requests = self._in_windows if has_window else self._extending
        if len(requests) == 1 and step is None:
            return self._extend.run(requests[0], layer, q, sm_scale, sink_logits)
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        for request in requests:
            rows = request.rows
            out[rows], lse[rows] = self._extend.run(request, layer, q[rows], sm_scale, sink_logits)
        if step is not None and self._decode_rows is not None:
            single = self._decode_rows
            out[single], lse[single] = with_sink_logits(*step.run(layer, q[single], sm_scale), sink_logits)
        return out, lse

    def _plan_decode(self, batch: AttentionBatch, requests: list[int]) -> TileStep | RowStep:
        pool_rows = batch.req_pool_indices
        if len(requests) < len(batch.seq_lens):
            pool_rows = pool_rows[requests]
        waterlines = [batch.waterlines[i] for i in requests]
        seq_lens = [batch.seq_lens[i] for i in requests]
        paths = tuple(batch.paths[i] for i in requests)
        spans = self._recent.get(paths, lambda: SpanTiles(paths, self.geometry, self.biases))
        suffix_lens = [end - start for start, end in zip(waterlines, seq_lens, strict=True)]
        if (joined := spans.joined_for(suffix_lens, self._views.k_rows, self._views.v_rows)) is not None:
            joined.locate(waterlines, seq_lens, pool_rows, batch.req_to_token)
            return joined
        layout = spans.layout_for(suffix_lens)
        suffix = locate_suffixes(layout, waterlines, seq_lens, pool_rows, batch.req_to_token)
        return TileStep(self._views, layout, suffix, self._scratch)
