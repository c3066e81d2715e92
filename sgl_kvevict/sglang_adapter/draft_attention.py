"""Attention of a draft model (speculative decoding) over compressed prefixes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from torch import Tensor

from kvevict_kernels.span_runs import SpanRuns, compressed_len_of
from sgl_kvevict.segments.prompt_observation import Recorder
from sgl_kvevict.segments.shadow import DraftRows
from sgl_kvevict.sglang_adapter.attention_backend import KVEvictAttentionBackend, readers_of
from sgl_kvevict.sglang_adapter.kv_pools import full_pool_of
from sgl_kvevict.support import BACKEND_NAME

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.speculative.draft_utils import DraftBackendFactory
    from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker

    from sgl_kvevict.sglang_adapter.tree import KVEvictTree


NUM_SEEN = 512
"""Queries of a request in one prefill, its last ones, whose attention decides which rows the draft keeps."""


@dataclass
class SeenQueries:
    """The last queries of a request in one prefill, from position ``start + len(token_slots) - count`` on.

    ``token_slots``, [num_tokens], int64, are the request's uncompressed tokens, from position ``start`` on.
    """

    rows: DraftRows
    token_slots: Tensor
    start: int
    count: int
    has_failed: bool = False  # nothing is lost but what was not recorded

    def record(self, layer: int, queries: Tensor, lse: Tensor, _k_buffer: Tensor, sm_scale: float) -> None:
        """Record what these queries of a layer paid to the request's uncompressed tokens."""
        query_start = self.start + self.token_slots.numel() - self.count
        # Queries of a layer may be a strided view of a fused projection, and the kernel reads them without strides.
        queries, lse = queries[-self.count :].contiguous(), lse[-self.count :].contiguous()
        self.rows.see(layer, queries, lse, self.token_slots, self.start, query_start, sm_scale)


class DraftAttentionBackend(KVEvictAttentionBackend):
    """Attention of the draft's prefills, which reads the shadows of spans; see :mod:`sgl_kvevict.segments.shadow`.

    The target's pool remembers it for the tree's factory. Raises as :class:`KVEvictAttentionBackend`.
    """

    def __init__(self, model_runner: ModelRunner) -> None:
        super().__init__(model_runner)
        self.rows = DraftRows(self.geometry, self.arena.k, self.arena.v)
        # The factory sees the target's runner and pool only.
        full_pool_of(model_runner.token_to_kv_pool_allocator.get_kvcache()).kvevict_drafts = self

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Plan a prefill of the draft, or its forward over the tokens of a verification step, which is not observed."""
        super().init_forward_metadata(forward_batch)
        if forward_batch.forward_mode.is_idle():
            return
        # Attention to the former token of a slot says nothing about the new one.
        self.rows.forget(forward_batch.out_cache_loc)
        # Its tokens may be rejected drafts, whose attention is no prompt's.
        if forward_batch.forward_mode.is_draft_extend_v2():
            self._observed = []

    def _paths(self, tree: KVEvictTree, readers: Sequence[Req]) -> tuple[tuple[SpanRuns, ...], ...]:
        return tree.draft_paths(readers)

    def _observe(self, tree: KVEvictTree, req: Req, start: int, end: int) -> Sequence[Recorder]:
        compressed_len = compressed_len_of(*tree.draft_paths([req]))
        slots = tree.port.slots_of(req, compressed_len, end)
        return [SeenQueries(self.rows, slots, compressed_len, min(end - start, NUM_SEEN))]

    def plan_step(
        self, readers: Sequence[Req] | None, seq_lens: list[int], rows: Tensor, table: Tensor, device_seq_lens: Tensor
    ) -> None:
        """Plan a decode step, which is not observed; ``rows`` of ``table`` have the slots of each branch."""
        self._observed = []
        batch = self._batch(readers, seq_lens, None, rows, device_seq_lens)
        self.attention.plan(replace(batch, req_to_token=table))


class DraftSteps:
    """The decode steps of one round of drafts: step i sees i + 1 tokens more than SGLang's lengths say.

    With ``topk`` above 1 a request has as many branches. Branch t's tokens lie in the row's slots from ``seq_len + t *
    num_steps`` on. Here each branch gets a row of its own, with these slots behind the request's.
    """

    needs_cpu_seq_lens = True

    def __init__(self, backend: DraftAttentionBackend, topk: int, num_steps: int) -> None:
        self.attn_backends = [DraftStep(self, i) for i in range(num_steps - 1)]
        self.backend = backend
        self._topk, self._num_steps = topk, num_steps
        self._forward: ForwardBatch
        self._rows: Tensor
        self._table: Tensor

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Begin a round."""
        self._forward = forward_batch
        self._rows, self._table = forward_batch.req_pool_indices, self.backend.req_to_token_pool.req_to_token
        if self._topk > 1:
            self._table = self._branches(forward_batch)
            self._rows = torch.arange(len(self._table), device=self._rows.device)

    def plan(self, step: int) -> None:
        """Plan one step."""
        forward, topk = self._forward, self._topk
        readers = readers_of(forward.rids)
        seq_lens = [length + step + 1 for length in forward.seq_lens_cpu.tolist() for _ in range(topk)]
        self.backend.plan_step(
            None if readers is None else [reader for reader in readers for _ in range(topk)],
            seq_lens,
            self._rows,
            self._table,
            forward.seq_lens.repeat_interleave(topk) + step + 1,
        )

    def _branches(self, forward_batch: ForwardBatch) -> Tensor:
        """[num_requests * topk, longest row], int32: the slots that each branch sees."""
        num_steps, topk = self._num_steps, self._topk
        rows, lens = forward_batch.req_pool_indices.long(), forward_batch.seq_lens.long()
        width = int(forward_batch.seq_lens_cpu.max()) + num_steps
        slots: Tensor = self.backend.req_to_token_pool.req_to_token
        table = slots[rows, :width].repeat_interleave(topk, dim=0)
        own = torch.arange(topk * num_steps, device=rows.device)
        drafts = slots[rows[:, None], lens[:, None] + own]
        places = lens.repeat_interleave(topk)[:, None] + own[:num_steps]
        return table.scatter_(1, places, drafts.view(-1, num_steps))


class DraftStep(AttentionBackend):
    """One decode step of the draft; planned at its first layer, when the step before has run."""

    def __init__(self, steps: DraftSteps, index: int) -> None:
        super().__init__()
        self._steps = steps
        self._index = index

    def forward_decode(
        self, q: Tensor, k: Tensor, v: Tensor, layer: RadixAttention, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Attend with one new token per branch; see :meth:`KVEvictAttentionBackend.forward_decode`."""
        backend = self._steps.backend
        # SGLang asks for the plans of a round at its beginning, and one attention holds one plan at a time.
        if backend.places.get(layer.layer_id) == 0:
            self._steps.plan(self._index)
        return backend.forward_decode(q, k, v, layer, *args, **kwargs)


def around_create_backend(
    original: Callable[..., Any],
    factory: DraftBackendFactory,
    backend_name: str,
    backend_map: dict[str, Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Hook of ``DraftBackendFactory._create_backend``: ours for the draft's steps, and for its prefills."""
    is_steps = kwargs.get("stamps_children", False)

    def build() -> tuple[str, object]:
        backend = factory.draft_model_runner.attn_backend
        return BACKEND_NAME, DraftSteps(backend, factory.topk, factory.speculative_num_steps) if is_steps else backend

    return original(factory, backend_name, {**backend_map, BACKEND_NAME: build}, *args, **kwargs)


def around_capture(original: Callable[..., None], worker: EagleDraftWorker, *args: object, **kwargs: object) -> None:
    """Hook of ``EagleDraftWorker._capture_cuda_graphs``: with our attention the draft runs without graphs."""
    if not isinstance(worker.draft_attn_backend, DraftSteps):
        original(worker, *args, **kwargs)
        return
    worker.cuda_graph_runner = worker.cuda_graph_runner_for_draft_extend = None
