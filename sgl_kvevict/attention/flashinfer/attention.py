"""Attention by FlashInfer: its paged prefill for spans and for suffixes, merged by log-sum-exp."""

from __future__ import annotations

import torch
from torch import Tensor

from kvevict_kernels.span_runs import SpanRuns
from sgl_kvevict.attention.batch import MAX_BATCHES, AttentionBatch, BatchKey, RecentBatches, require_widths
from sgl_kvevict.attention.flashinfer.lists import SpanLists, build_span_lists, merge_spans
from sgl_kvevict.attention.flashinfer.wrapper import WORKSPACE_BYTES, PagedPrefill, compiles_kernels
from sgl_kvevict.attention.interface import with_sink_logits
from sgl_kvevict.attention.kernel_facts import kernels_for
from sgl_kvevict.errors import InvariantError
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.support import KERNELS, require

SUFFIX_PREFILLS = 3
"""Used in turn, so that a forward's plan does not wait until the device has copied the previous one."""


class FlashInferAttention:
    """Attention by FlashInfer; arguments as for :func:`sgl_kvevict.attention.backend.build_attention`.

    Spans are planned when requests come or go or their paths change, once for all layers; suffixes once per forward.
    Needs head_dim 64, 128 or 256, a 16-bit dtype (else :class:`UnsupportedSetupError`, as without FlashInfer), and no
    windows (:class:`sgl_kvevict.attention.backend.ByWindow`).
    """

    def __init__(self, geometry: KVGeometry, k_arena: Tensor, v_arena: Tensor) -> None:
        pool = k_arena.device, k_arena.dtype, geometry.head_dim
        require(KERNELS, kernels_for("flashinfer", *pool, is_latent=geometry.is_latent))
        self.geometry = geometry
        self.k_arena = k_arena
        self.v_arena = v_arena
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=k_arena.device)
        with compiles_kernels():
            # fa2: without split-KV its plan does not depend on the rows' lengths.
            prefills = [
                PagedPrefill(workspace, geometry.head_dim, k_arena.dtype, "fa2")
                for _ in range(SUFFIX_PREFILLS + MAX_BATCHES)
            ]
        self._suffix_prefills, self._span_prefills = prefills[:SUFFIX_PREFILLS], prefills[SUFFIX_PREFILLS:]
        # Of each batch its spans and their prefill, planned for all layers.
        self._recent: RecentBatches[BatchKey, tuple[SpanLists, PagedPrefill]] = RecentBatches(
            lambda dropped: self._span_prefills.append(dropped[1])
        )
        self._num_new = -1
        self._spans: tuple[SpanLists, PagedPrefill] | None = None

    def warm_up(self) -> None:
        """Compile and run both kernels once, on token slot 0 and head slot 0; see :func:`compiles_kernels`."""
        device, geometry = self.k_arena.device, self.geometry
        slots = torch.zeros(1, 2, dtype=torch.int32, device=device)
        shape = (geometry.num_layers, geometry.num_kv_heads)
        starts = torch.zeros(shape, dtype=torch.int32, device=device)
        span = SpanRuns(slots[0, :1], starts, torch.ones_like(starts), 1, slots[0, :1])
        batch = AttentionBatch(((span,),), [2], None, torch.zeros(1, dtype=torch.int64, device=device), slots)
        q = torch.zeros(1, geometry.num_qo_heads, geometry.head_dim, dtype=self.k_arena.dtype, device=device)
        with compiles_kernels():
            self.plan(batch)
            self.run(0, q, 1.0)

    def plan(self, batch: AttentionBatch) -> None:
        """Prepare the layers of one forward; trees are planned by :class:`sgl_kvevict.attention.backend.ByWindow`."""
        require_widths(batch.paths, has_coding=False)
        if batch.visible is not None:
            raise InvariantError("a tree of new tokens came to FlashInfer, which was planned for causal masks only")
        self._num_new = sum(batch.new_lens)
        self._spans = self._recent.get(batch.key, lambda: self._plan_spans(batch)) if any(batch.paths) else None
        # The one that was planned longest ago: its copy to the device has ended.
        self._suffix_prefills.append(self._suffix_prefills.pop(0))
        self._suffix_prefills[-1].plan_suffixes(batch, self.geometry)

    def run(self, layer: int, q: Tensor, sm_scale: float, sink_logits: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Attend as planned."""
        geometry = self.geometry
        shape = (self._num_new, geometry.num_qo_heads, geometry.head_dim)
        if tuple(q.shape) != shape:
            raise InvariantError(f"q: planned {list(shape)}, got {list(q.shape)}")
        queries = q.contiguous().to(self.k_arena.dtype)
        k, v = self.k_arena[layer].unsqueeze(1), self.v_arena[layer].unsqueeze(1)
        out, lse = self._suffix_prefills[-1].run(queries, k, v, sm_scale)
        if self._spans is not None:
            lists, prefill = self._spans
            prefill.set_row_bounds(lists.kv_indptr[layer])
            stacked = queries.view(-1, geometry.group_size, geometry.head_dim).index_select(0, lists.q_rows)
            # The whole arena as pages of one head slot: an entry may lie in any layer's lane.
            k, v = (arena.view(-1, 1, 1, geometry.head_dim) for arena in (self.k_arena, self.v_arena))
            span_out, span_lse = prefill.run(stacked, k, v, sm_scale)
            out, lse = merge_spans(lists, span_out, span_lse, out, lse)
        return with_sink_logits(out.to(q.dtype), lse, sink_logits)

    def _plan_spans(self, batch: AttentionBatch) -> tuple[SpanLists, PagedPrefill]:
        lists = build_span_lists(batch.paths, batch.new_lens, self.geometry, self.k_arena.device)
        # There is one: `RecentBatches` has given a dropped layout's back before it builds the next.
        prefill = self._span_prefills.pop()
        prefill.plan(lists.pages, self.geometry.group_size, 1, causal=False, disable_split_kv=True)
        return lists, prefill
