"""Attention by FlashInfer: spans and suffixes through its paged prefill, merged by log-sum-exp.

FlashInfer's log-sum-exps have base 2; what leaves this module is natural.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from kvevict_kernels.checks import check_arenas
from sgl_kvevict.attention.batch import AttentionBatch, BatchKey
from sgl_kvevict.attention.flashinfer.lists import (
    SpanLists,
    SuffixLists,
    build_span_lists,
    build_suffix_lists,
    merge_base2,
)
from sgl_kvevict.attention.recent_batches import MAX_BATCHES, RecentBatches
from sgl_kvevict.attention.refusals import DTYPES_16, flashinfer_reasons
from sgl_kvevict.attention.sink_logits import with_sink_logits
from sgl_kvevict.errors import InvariantError, UnsupportedSetupError
from sgl_kvevict.geometry import KVGeometry

WORKSPACE_BYTES = 256 * 2**20
SUFFIX_WRAPPERS = 3
_INDPTR_ATTRIBUTE = "_paged_kv_indptr_buf"
"""Where the wrapper of FlashInfer 0.7.2 keeps the row bounds that it hands to the kernel."""


class PagedWrapper(Protocol):
    """The part of ``BatchPrefillWithPagedKVCacheWrapper`` that is used here."""

    def plan(self, *args: Any, **kwargs: Any) -> None:
        """Schedule a batch."""

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Attend as planned."""


class Planned:
    """One wrapper, planned again only when the device has taken the last plan.

    A plan travels from a pinned buffer of the wrapper, asynchronously; planning again too early would overwrite it.
    """

    def __init__(self, wrapper: PagedWrapper, device: torch.device) -> None:
        self.wrapper = wrapper
        self._taken: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._taken = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._is_planned = False

    def plan(self, *args: Any, **kwargs: Any) -> None:
        """Plan as the wrapper does, once the device has taken the plan before."""
        if self._taken is not None and self._is_planned:
            self._taken.synchronize()
        self.wrapper.plan(*args, **kwargs)
        self._is_planned = True
        if self._taken is not None:
            self._taken.record()


@dataclass(frozen=True)
class _PlannedSpans:
    """Planned spans of one batch; both None if it reads none."""

    lists: SpanLists | None
    planned: Planned | None


class FlashInferAttention:
    """Attention of new tokens over compressed spans and uncompressed token slots.

    Spans are planned when requests come or go or their paths change, once for all layers; suffixes once per forward.

    Args:
        geometry: sizes; head_dim 64, 128 or 256, no windows (:class:`sgl_kvevict.attention.by_window.ByWindow`).
        k_arena: [num_layers, num_token_slots, num_kv_heads, head_dim], bfloat16 or float16, contiguous.
        v_arena: like ``k_arena``.
        make_wrapper: builds a wrapper; default: FlashInfer's ``BatchPrefillWithPagedKVCacheWrapper``, backend fa2.

    Raises:
        UnsupportedSetupError: FlashInfer is missing, or does not have the model's head_dim or dtype.
        ValueError: wrong shape, dtype or device of an arena; or some layer has a window.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        k_arena: Tensor,
        v_arena: Tensor,
        make_wrapper: Callable[[], PagedWrapper] | None = None,
    ) -> None:
        if reasons := flashinfer_reasons(k_arena.dtype, geometry.head_dim):
            raise UnsupportedSetupError(reasons)
        if geometry.has_windows:
            raise ValueError(f"windows: spans are read whole here, got {geometry.windows}")
        check_arenas(k_arena, v_arena, None, geometry.arena_shape, DTYPES_16)
        self.geometry = geometry
        self.k_arena = k_arena
        self.v_arena = v_arena
        make = make_wrapper or flashinfer_wrappers(k_arena.device)
        self._span_wrappers = [Planned(make(), k_arena.device) for _ in range(MAX_BATCHES)]
        self._suffix_wrappers = [Planned(make(), k_arena.device) for _ in range(SUFFIX_WRAPPERS)]
        self._recent: RecentBatches[BatchKey, _PlannedSpans] = RecentBatches(self._take_back_wrapper)
        self._num_new = -1
        self._spans = _PlannedSpans(None, None)

    def plan(self, batch: AttentionBatch) -> None:
        """Prepare the layers of one forward; see :meth:`sgl_kvevict.attention.interface.Attention.plan`."""
        self._num_new = sum(batch.new_lens)
        self._spans = self._recent.get(batch.key, lambda: self._plan_spans(batch))
        self._suffix_wrappers.append(self._suffix_wrappers.pop(0))
        plan_suffixes(self._suffix_wrappers[-1], build_suffix_lists(batch), self.geometry, self.k_arena.dtype)

    def run(self, layer: int, q: Tensor, sm_scale: float, sink_logits: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Attend as planned; see :meth:`sgl_kvevict.attention.interface.Attention.run`."""
        geometry = self.geometry
        shape = (self._num_new, geometry.num_qo_heads, geometry.head_dim)
        if tuple(q.shape) != shape:
            raise InvariantError(f"q: planned {list(shape)}, got {list(q.shape)}")
        queries = q.contiguous().to(self.k_arena.dtype)
        # k_scale multiplies the plan's sm_scale of 1: layers may differ.
        options: dict[str, Any] = {"return_lse": True, "k_scale": sm_scale, "enable_pdl": False}
        tokens = (self.k_arena[layer].unsqueeze(1), self.v_arena[layer].unsqueeze(1))
        out, lse = self._suffix_wrappers[-1].wrapper.run(queries, tokens, **options)
        lists, planned = self._spans.lists, self._spans.planned
        if lists is not None and planned is not None:
            setattr(planned.wrapper, _INDPTR_ATTRIBUTE, lists.kv_indptr[layer])
            stacked = queries.view(-1, geometry.group_size, geometry.head_dim).index_select(0, lists.q_rows)
            rows = tuple(arena.view(-1, 1, 1, geometry.head_dim) for arena in (self.k_arena, self.v_arena))
            span_out, span_lse = planned.wrapper.run(stacked, (rows[0], rows[1]), **options)
            out, lse = merge_base2(lists, span_out, span_lse, out, lse)
        return with_sink_logits(out.to(q.dtype), lse * math.log(2.0), sink_logits)

    def _take_back_wrapper(self, dropped: _PlannedSpans) -> None:
        if dropped.planned is not None:
            self._span_wrappers.append(dropped.planned)

    def _plan_spans(self, batch: AttentionBatch) -> _PlannedSpans:
        lists = build_span_lists(batch.paths, batch.new_lens, self.geometry, self.k_arena.device)
        if lists is None:
            return _PlannedSpans(None, None)
        planned = self._span_wrappers.pop()
        # Without split-KV the plan depends on qo_indptr alone, and the kernel reads each layer's lengths from the
        # device (run): rows of one entry stand in for all layers here.
        planned.plan(
            lists.qo_indptr,
            torch.arange(lists.num_rows + 1, dtype=torch.int32),
            lists.kv_indices,
            torch.ones(lists.num_rows, dtype=torch.int32),
            self.geometry.group_size,
            1,
            self.geometry.head_dim,
            1,
            causal=False,
            disable_split_kv=True,
            **_plan_options(self.k_arena.dtype),
        )
        if not hasattr(planned.wrapper, _INDPTR_ATTRIBUTE):
            raise UnsupportedSetupError(
                [f"this FlashInfer's wrapper has no {_INDPTR_ATTRIBUTE}; attention 'flashinfer' supports 0.7.2"]
            )
        return _PlannedSpans(lists, planned)


def plan_suffixes(
    planned: Planned, lists: SuffixLists, geometry: KVGeometry, dtype: torch.dtype, window: int = 0
) -> None:
    """Plan ordinary paged attention of the last tokens of every request to all of it.

    Args:
        planned: wrapper.
        lists: pages of one token slot.
        geometry: sizes.
        dtype: of queries, keys and values.
        window: tokens that a query sees, itself included; 0: all.
    """
    planned.plan(
        lists.qo_indptr,
        lists.kv_indptr,
        lists.kv_indices,
        torch.ones(lists.qo_indptr.numel() - 1, dtype=torch.int32),
        geometry.num_qo_heads,
        geometry.num_kv_heads,
        geometry.head_dim,
        1,
        causal=True,  # aligned to the ends: the last new token sees the whole suffix
        window_left=window - 1,  # tokens before a query; -1: all
        **_plan_options(dtype),
    )


def _plan_options(dtype: torch.dtype) -> dict[str, Any]:
    return {"sm_scale": 1.0, "q_data_type": dtype, "kv_data_type": dtype}


def flashinfer_wrappers(device: torch.device, backend: str = "fa2") -> Callable[[], PagedWrapper]:
    """Return a factory of FlashInfer's wrappers that share one workspace.

    Args:
        device: of the workspace.
        backend: FlashInfer's name of its kernels; spans need "fa2", whose plan does not depend on lengths.

    Raises:
        UnsupportedSetupError: FlashInfer cannot be imported.
    """
    try:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper
    except ImportError as error:
        raise UnsupportedSetupError(
            [f"attention is 'flashinfer', but FlashInfer cannot be imported: {error}"]
        ) from error
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)

    def make() -> PagedWrapper:
        wrapper: PagedWrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=backend)
        return wrapper

    return make
