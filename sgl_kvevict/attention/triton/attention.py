"""Attention by our own Triton kernels: spans and suffixes in the same launches, lengths read on the device."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvevict_kernels.checks import FP8
from kvevict_kernels.ragged_decode.addresses import NUM_ADDRESSES, TableAddresses
from kvevict_kernels.ragged_decode.chunks import bucket
from kvevict_kernels.ragged_decode.host_lists import SPLIT_ROWS, uses_split
from kvevict_kernels.ragged_decode.launch import plan_batch, run_layer, sizes_on, start_step
from kvevict_kernels.ragged_decode.tables import LayerInputs, Step
from kvevict_kernels.row_codec import RowCoding
from kvevict_kernels.row_sizes import WIDTHS
from kvevict_kernels.span_runs import SpanRuns
from kvevict_kernels.transfer import to_device
from sgl_kvevict.attention.batch import AttentionBatch, BatchKey, RecentBatches, require_widths
from sgl_kvevict.attention.flashinfer.prefill import PlainPrefill
from sgl_kvevict.attention.kernel_facts import kernels_for
from sgl_kvevict.errors import InvariantError, UnsupportedSetupError
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.support import KERNELS, MAX_DRAFTS, require

WARM_UP_KEYS = 1024
"""Enough for the keys of a short prefill to be split."""


@dataclass
class _PlannedBatch:
    """Tables of a batch, and its last step."""

    addresses: TableAddresses  # tables of what our kernels attend to
    plain_requests: list[int]  # requests for which ``plain_prefill`` attends
    step: Step | None = None  # of the last planned forward


class TritonAttention:
    """Attention by our Triton kernels; other arguments as for :func:`sgl_kvevict.attention.backend.build_attention`.

    Spans are laid out on the device when requests come or go, or their paths change. A step copies no lists and reads
    nothing back; it launches one kernel that counts the suffixes' work.

    A CUDA graph may record decode and verification steps: call :meth:`start_capture` before the recording; record one
    :meth:`start_step` and :meth:`run` of every layer; call :meth:`follow` before each replay.

    Args:
        q_dtype: of queries and results, where the arena holds float8 (default: bfloat16); otherwise the arena's dtype.
        plain_prefill: FlashInfer's attention for long prefills that read no span; None: our kernel computes them.
        verifies: some batches are trees (:attr:`AttentionBatch.visible`), whose kernels are warmed up as well.
        coding: by which rows of 4 bits are read; None: there are none.

    UnsupportedSetupError: no kernel is compiled for the model's head_dim or the pool's dtype.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        k_arena: Tensor,
        v_arena: Tensor,
        q_dtype: torch.dtype | None = None,
        plain_prefill: PlainPrefill | None = None,
        *,
        verifies: bool = False,
        coding: RowCoding | None = None,
    ) -> None:
        is_latent = geometry.is_latent
        require(KERNELS, kernels_for("triton", k_arena.device, k_arena.dtype, geometry.head_dim, is_latent=is_latent))
        self.geometry = geometry
        self.k_arena = k_arena
        self.v_arena = v_arena
        self.plain_prefill = plain_prefill
        self._verifies = verifies
        self._coding = coding
        is_fp8 = k_arena.dtype == FP8
        self.q_dtype = (q_dtype or torch.bfloat16) if is_fp8 else k_arena.dtype
        self._recent: RecentBatches[BatchKey, _PlannedBatch] = RecentBatches()
        self._planned: _PlannedBatch | None = None
        self._sizes = sizes_on(
            k_arena.device,
            num_layers=geometry.num_layers,
            num_kv_heads=geometry.num_kv_heads,
            group_size=geometry.group_size,
            head_dim=geometry.head_dim,
            has_windows=geometry.has_windows,
            has_few_bits=coding is not None,
            is_fp8=is_fp8,
        )
        self._partials = self._scratch(0)
        self._new_len = 1  # of captured steps, per request
        self._captured_addresses = torch.empty(NUM_ADDRESSES, dtype=torch.int64, device=k_arena.device)

    def warm_up(self, sink_dtype: torch.dtype | None = None) -> None:
        """Launch every kernel once as serving does, so that none is compiled while requests wait.

        Reads token slot 0 and row 0 of its own table, and writes to its own memory. ``sink_dtype``: of the layers' sink
        logits; None: there are none.
        """
        device, geometry = self.k_arena.device, self.geometry
        many = SPLIT_ROWS // geometry.group_size + 1  # q rows of ragged_extend, in split parts, and merged
        few = SPLIT_ROWS // geometry.group_size  # q rows of the larger tile
        new_lens = [1, max(few, 1), max(many, 2), max(many, 2)]
        empty = torch.zeros(geometry.num_layers, geometry.num_kv_heads, dtype=torch.int32, device=device)
        nothing = torch.zeros(1, dtype=torch.int32, device=device)
        widths = WIDTHS[:1] if self._coding is None else WIDTHS
        path = tuple(SpanRuns(nothing, empty, empty, 1, nothing, bits) for bits in widths)
        length = 1 + bucket(max(new_lens)) + WARM_UP_KEYS
        batch = AttentionBatch(
            paths=(path, path, path, ()),
            seq_lens=[length] * 4,
            extend_lens=new_lens,
            req_pool_indices=torch.zeros(4, dtype=torch.int64, device=device),
            req_to_token=torch.zeros(1, length, dtype=torch.int32, device=device),
        )
        shape = (sum(new_lens), geometry.num_qo_heads, geometry.head_dim)
        sinks = (None,) if sink_dtype is None else (None, torch.zeros(shape[1], dtype=sink_dtype, device=device))
        # A decode step has kernels of its own.
        batches = [batch, replace(batch, extend_lens=None)]
        if self._verifies:
            news = [min(new, MAX_DRAFTS) for new in new_lens]
            trees = torch.ones(sum(news), dtype=torch.int64, device=device)
            batches.append(replace(batch, extend_lens=news, visible=trees))
        for chosen in batches:
            self.plan(chosen)
            q = torch.zeros(shape, dtype=self.q_dtype, device=device)[: sum(chosen.new_lens)]
            # Whether a layer has a window is compiled into a kernel; how wide it is, is not.
            for layer in {geometry.window(layer) > 0: layer for layer in range(geometry.num_layers)}.values():
                for sink_logits in sinks:
                    self.run(layer, q, 1.0, sink_logits)
        # No batch of requests has these tables, and their scratch would stay allocated.
        self._recent = RecentBatches()
        self._planned = None
        self._partials = self._scratch(0)

    def plan(self, batch: AttentionBatch) -> None:
        """Prepare a forward; with ``device_seq_lens`` the host copies nothing while the tables stay the same."""
        # Bounds instead of lengths, so that the tables stay the same for many steps of a growing answer.
        key = batch.key._replace(suffix_bounds=_suffix_bounds(batch))
        planned = self._recent.get(key, lambda: self._build(key))
        seq_lens = batch.device_seq_lens
        if seq_lens is None:
            seq_lens = to_device(torch.tensor(batch.seq_lens, dtype=torch.int32), self.k_arena.device)
        self._planned = planned
        if self.plain_prefill is not None and planned.plain_requests:
            self.plain_prefill.plan(batch, planned.plain_requests)
        self.start_step(seq_lens, batch.req_pool_indices, batch.req_to_token, batch.visible)

    def start_step(
        self, seq_lens: Tensor, req_pool_indices: Tensor, req_to_token: Tensor, visible: Tensor | None = None
    ) -> None:
        """Set the lengths of one forward of the batch laid out last; replays read them from the same memory.

        Arguments as the fields of :class:`AttentionBatch`. InvariantError: no batch is laid out.
        """
        planned = self._planned
        if planned is None:
            raise InvariantError("a step was started before a batch was planned")
        planned.step = start_step(
            planned.addresses,
            req_to_token=req_to_token,
            pool_rows=req_pool_indices.long(),
            seq_lens=seq_lens.int(),
            visible=visible,
        )

    def start_capture(self, num_requests: int, new_len: int = 1) -> None:
        """Lay out steps of ``num_requests`` requests with ``new_len`` new tokens each, which are captured next.

        UnsupportedSetupError: more new tokens than a recorded step may have.
        """
        if not uses_split(new_len, self.geometry.group_size):
            raise UnsupportedSetupError(
                [
                    f"{new_len} draft tokens in a captured step; allowed: {SPLIT_ROWS} q rows per KV head, with "
                    f"{self.geometry.group_size} each (fewer --speculative-num-draft-tokens, or "
                    "--cuda-graph-backend-decode disabled)"
                ]
            )
        news = (new_len,) * num_requests
        addresses = self._build(BatchKey(((),) * num_requests, news, news, new_len > 1)).addresses
        self._new_len = new_len
        self._planned = _PlannedBatch(addresses.captured_at(self._captured_addresses), [])

    def follow(self, batch: AttentionBatch, num_requests: int) -> None:
        """Give the next replay the tables of a batch; it reads lengths and rows where :meth:`start_step` did.

        The batch has at most ``num_requests`` requests, the number recorded; the rest is padding. InvariantError: it
        has more, or other numbers of new tokens than recorded.
        """
        padding, new_len = num_requests - len(batch.paths), self._new_len
        if set(batch.new_lens) != {new_len} or padding < 0:
            raise InvariantError(f"{num_requests} rows of {new_len} were captured, got {batch.new_lens} new tokens")
        bounds = _suffix_bounds(batch) + (new_len,) * padding
        # Padding attends to its own new tokens: a row without any key would have an lse of -inf.
        paths, news = batch.paths + ((),) * padding, (new_len,) * num_requests
        key = BatchKey(paths, news, bounds, new_len > 1)
        planned = self._recent.get(key, lambda: self._build(key))
        # The recorded kernels find their tables through these addresses: one small copy gives them the new batch.
        self._captured_addresses.copy_(planned.addresses.on_device)

    def run(self, layer: int, q: Tensor, sm_scale: float, sink_logits: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Attend as planned."""
        planned, geometry = self._planned, self.geometry
        num_new = 0 if planned is None else planned.addresses.tables.num_new
        shape = (num_new, geometry.num_qo_heads, geometry.head_dim)
        if planned is None or planned.step is None or tuple(q.shape) != shape:
            raise InvariantError(f"q: planned {list(shape)}, got {list(q.shape)}")
        queries = q.to(self.q_dtype)
        if not queries[0].is_contiguous():  # a slice of a fused projection needs no copy
            queries = queries.contiguous()
        out = torch.empty(*q.shape[:2], geometry.v_head_dim, dtype=queries.dtype, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        k_scale, v_scale = geometry.scales.of(layer)
        inputs = LayerInputs(
            layer,
            queries,
            self.k_arena,
            self.v_arena,
            sm_scale * k_scale,
            v_scale,
            geometry.window(layer),
            self._coding,
            None if sink_logits is None else sink_logits.contiguous(),
        )
        run_layer(planned.addresses, planned.step, inputs, out=out, lse=lse)
        if self.plain_prefill is not None and planned.plain_requests:
            self.plain_prefill.run(layer, queries, sm_scale, out, lse, sink_logits)
        return out.to(q.dtype), lse

    def _build(self, key: BatchKey) -> _PlannedBatch:
        require_widths(key.paths, has_coding=self._coding is not None)
        is_plain, group = self.plain_prefill is not None and not key.is_tree, self.geometry.group_size
        requests = enumerate(zip(key.paths, key.new_lens, strict=True))
        plain_requests = [i for i, (path, new) in requests if is_plain and not (path or uses_split(new, group))]
        tables = plan_batch(
            key.paths,
            key.new_lens,
            key.suffix_bounds,
            sizes=self._sizes,
            device=self.k_arena.device,
            elsewhere=plain_requests,
        )
        if self._partials[0].shape[0] < tables.num_partials:
            self._partials = self._scratch(tables.num_partials)
        return _PlannedBatch(TableAddresses.of(tables, self._partials), plain_requests)

    def _scratch(self, num_rows: int) -> tuple[Tensor, Tensor]:
        """Scratch of all layers and forwards, one after the other on one stream; a larger batch replaces it."""
        device = self.k_arena.device
        return (
            torch.empty(num_rows, self.geometry.v_head_dim, dtype=torch.float32, device=device),
            torch.empty(num_rows, dtype=torch.float32, device=device),
        )


def _suffix_bounds(batch: AttentionBatch) -> tuple[int, ...]:
    """Bounds that the suffixes of a batch do not exceed for many steps."""
    return tuple(bucket(end - start) for start, end in zip(batch.compressed_lens, batch.seq_lens, strict=True))
