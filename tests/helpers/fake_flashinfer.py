"""FlashInfer's paged prefill as its documentation has it, in torch float32, row by row.

FlashInfer runs on NVIDIA GPUs only; this stands in for it, so that index lists, plans, masks and bases of the
log-sum-exp are tested everywhere.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class FakePagedWrapper:
    """``BatchPrefillWithPagedKVCacheWrapper`` with page size 1, backend fa2.

    As there: bounds and indices are kept in attributes that ``run`` reads; causal masks and windows are aligned to the
    ends of queries and keys, and ``window_left`` keys before a query are seen, all if it is -1; the log-sum-exp has
    base 2; a row without keys gives 0 and -inf; without split-KV the plan holds one work item per (row, tile of
    queries), and lengths are read when it runs; with it, the plan's lengths count.
    """

    def __init__(self) -> None:
        self.num_plans = self.num_span_plans = 0

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        window_left: int = -1,
        sm_scale: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        for index in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len):
            assert index.dtype == torch.int32
        assert qo_indptr.device.type == paged_kv_indptr.device.type == "cpu", "device tensors make plan() wait"
        assert len(qo_indptr) == len(paged_kv_indptr) == len(paged_kv_last_page_len) + 1
        assert page_size == 1
        assert bool((paged_kv_last_page_len == 1).all())
        self.num_plans += 1
        self.num_span_plans += disable_split_kv
        self.heads = (num_qo_heads, num_kv_heads, head_dim_qk)
        self.causal = causal
        self.window_left = window_left
        self.sm_scale = head_dim_qk**-0.5 if sm_scale is None else sm_scale
        self.dtypes = (q_data_type, kv_data_type)
        self._qo_indptr_buf = qo_indptr
        self._paged_kv_indptr_buf = paged_kv_indptr
        self._paged_kv_indices_buf = paged_kv_indices
        self.planned_lens = None if disable_split_kv else paged_kv_indptr.diff()

    def run(
        self,
        q: Tensor,
        paged_kv_cache: tuple[Tensor, Tensor],
        *,
        k_scale: float | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
    ) -> Any:
        num_qo_heads, num_kv_heads, head_dim = self.heads
        k_cache, v_cache = paged_kv_cache
        assert return_lse
        assert enable_pdl is False, "row bounds are written right before"
        assert (q.dtype, k_cache.dtype) == self.dtypes
        assert q.shape == (int(self._qo_indptr_buf[-1]), num_qo_heads, head_dim)
        assert k_cache.shape[1:] == v_cache.shape[1:] == (1, num_kv_heads, head_dim)
        kv_indptr = self._paged_kv_indptr_buf
        assert kv_indptr.dtype == torch.int32
        assert self.planned_lens is None or torch.equal(self.planned_lens, kv_indptr.diff())
        scale = self.sm_scale * (1.0 if k_scale is None else k_scale)
        out = torch.zeros_like(q)
        lse = torch.full(q.shape[:2], float("-inf"))
        for row in range(len(kv_indptr) - 1):
            begin, end = self._qo_indptr_buf[row : row + 2].tolist()
            pages = self._paged_kv_indices_buf[int(kv_indptr[row]) : int(kv_indptr[row + 1])].long()
            if not len(pages) or begin == end:
                continue
            k, v = (
                cache[pages, 0].float().repeat_interleave(num_qo_heads // num_kv_heads, dim=1)
                for cache in (k_cache, v_cache)
            )
            scores = torch.einsum("qhd,khd->qhk", q[begin:end].float(), k) * scale
            before = torch.arange(len(pages) - (end - begin), len(pages))[:, None] - torch.arange(len(pages))
            hidden = (before < 0) if self.causal else torch.zeros_like(before, dtype=torch.bool)
            if self.window_left >= 0:
                hidden |= before > self.window_left
            scores = scores.masked_fill(hidden[:, None], float("-inf"))
            out[begin:end] = torch.einsum("qhk,khd->qhd", scores.softmax(-1), v).to(q.dtype)
            lse[begin:end] = scores.logsumexp(-1) / torch.tensor(2.0).log()
        return out, lse
