"""Attention over layers whose KV SGLang keeps in a separate sliding-window pool, and their token slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from torch import Tensor

from kvevict_kernels.transfer import to_device
from sgl_kvevict.attention.batch import AttentionBatch, Path
from sgl_kvevict.attention.interface import Attention
from sgl_kvevict.sglang_adapter.kv_pools import window_layers_of

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.managers.schedule_batch import Req

    from sgl_kvevict.attention.triton.attention import TritonAttention
    from sgl_kvevict.sglang_adapter.tree import KVEvictTree


class WindowLayers:
    """Attention of the layers in the sliding-window pool, where nothing is compressed.

    SGLang finds a token's window slot through its full-attention slot, which compressed tokens lack. So each request
    has a row of window slots here, in the shape of ``req_to_token`` ([num_rows, max_context_len], int32). A row is
    valid from the first token that the next query sees.
    """

    def __init__(self, pool: SWAKVPool, attention: Attention, req_to_token: Tensor) -> None:
        self._pool = pool
        self.attention = attention
        self._places = window_layers_of(pool)
        self._rows = torch.zeros_like(req_to_token)
        # A window counts the query's own key.
        self._reach = max(attention.geometry.windows) - 1
        self._last_nodes: dict[int, int] = {}
        self._new_slots = torch.zeros(0, dtype=torch.int64, device=req_to_token.device)

    def plan(
        self, tree: KVEvictTree | None, readers: Sequence[Req] | None, batch: AttentionBatch, out_cache_loc: Tensor
    ) -> None:
        """Prepare one forward, with the ``batch`` as planned for the full-attention layers.

        ``out_cache_loc``: [num_new_tokens], int, full-attention slots. ``readers`` is None in warm-up.
        """
        self._begin_rows(tree, readers, batch)
        rows, device = batch.req_pool_indices, batch.req_pool_indices.device
        if batch.extend_lens is None:
            ends = batch.device_seq_lens
            # On a GPU the lengths are on the device already: no copy from the host.
            positions = (torch.tensor(batch.seq_lens) if ends is None else ends) - 1
        else:
            lens = to_device(torch.tensor(batch.extend_lens), device)
            # The size is given, so that the host does not ask the device for it.
            rows = torch.repeat_interleave(rows, lens, output_size=sum(batch.extend_lens))
            bounds = zip(batch.seq_lens, batch.extend_lens, strict=True)
            positions = to_device(torch.cat([torch.arange(end - new, end) for end, new in bounds]), device)
        self._take(rows, positions, out_cache_loc)
        self.attention.plan(self._read_by(batch))

    def start_capture(self, num_requests: int) -> None:
        """Lay out a step of so many requests, which is captured next."""
        self._captured.start_capture(num_requests)

    def start_step(self, seq_lens: Tensor, req_pool_indices: Tensor, out_cache_loc: Tensor) -> None:
        """Read the lengths of a step from SGLang's static buffers; recorded in the graph."""
        self._take(req_pool_indices, seq_lens - 1, out_cache_loc)
        self._captured.start_step(seq_lens, req_pool_indices, self._rows)

    def follow(self, tree: KVEvictTree | None, readers: Sequence[Req] | None, batch: AttentionBatch, size: int) -> None:
        """Give the replay of a step of ``size`` requests the batch that it runs for."""
        self._begin_rows(tree, readers, batch)
        self._captured.follow(self._read_by(batch), size)

    def attend(
        self,
        layer: RadixAttention,
        queries: Tensor,
        new_kv: tuple[Tensor, Tensor] | None,
        out_cache_loc: Tensor,
        sink_logits: Tensor | None,
    ) -> Tensor:
        """Store the new tokens' K and V (None: already stored), and attend as planned; see :meth:`Attention.run`.

        ``queries`` and the result: [num_new_tokens, num_qo_heads, head_dim].
        """
        place = self._places[layer.layer_id]
        if new_kv is not None:
            scales = self.attention.geometry.scales.of(place)
            self._pool.set_kv_buffer(layer, KVWriteLoc(out_cache_loc, self._new_slots), *new_kv, *scales)
        return self.attention.run(place, queries, layer.scaling, sink_logits)[0]

    @property
    def _captured(self) -> TritonAttention:
        return cast("TritonAttention", self.attention)  # the model's other layers were asked, whose attention is alike

    def _read_by(self, batch: AttentionBatch) -> AttentionBatch:
        paths: tuple[Path, ...] = ((),) * len(batch.seq_lens)  # nothing is compressed here
        return replace(batch, paths=paths, req_to_token=self._rows)

    def _begin_rows(self, tree: KVEvictTree | None, readers: Sequence[Req] | None, batch: AttentionBatch) -> None:
        """Fill rows before the new tokens, for requests whose last tree node changed.

        It changes with every prefill. A generating request keeps its row until its tokens enter the tree, where slots
        computed by another request may replace its own.
        """
        if tree is None or readers is None:
            return
        is_decode = batch.extend_lens is None
        for req, seq_len, new in zip(readers, batch.seq_lens, batch.new_lens, strict=True):
            row = req.kv.req_pool_idx
            if is_decode and self._last_nodes.get(row) == req.last_node:
                continue
            self._last_nodes[row] = req.last_node
            end = seq_len - new
            # Older slots may hold other requests' tokens by now, and no query looks there.
            start = max(end - self._reach, 0)
            self._rows[row, start:end] = tree.window_slots(req, start, end).to(self._rows.dtype)

    def _take(self, rows: Tensor, positions: Tensor, out_cache_loc: Tensor) -> None:
        self._new_slots = self._pool.translate_loc_from_full_to_swa(out_cache_loc.long())
        self._rows[rows.long(), positions.long()] = self._new_slots.to(self._rows.dtype)
