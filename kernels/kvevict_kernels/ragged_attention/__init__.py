"""Attention of q rows over explicit lists of KV rows: different keys per KV head, shared by many requests."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvevict_kernels.checks import KV_DTYPES, check_index_range, check_tensor
from kvevict_kernels.dispatch import backend_for
from kvevict_kernels.ragged_attention.cpu import CpuPlan, plan_cpu, run_cpu
from kvevict_kernels.ragged_attention.reference import ragged_attention_reference

if TYPE_CHECKING:
    from kvevict_kernels.ragged_attention.triton_impl import TritonPlan

__all__ = [
    "plan_ragged_attention",
    "ragged_attention",
    "ragged_attention_reference",
    "run_ragged_attention",
]

INDEX_DTYPES = (torch.int32, torch.int64)


def ragged_attention(
    q: Tensor,
    k_rows: Tensor,
    v_rows: Tensor,
    *,
    qo_indptr: Tensor,
    qo_indices: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    sm_scale: float,
) -> tuple[Tensor, Tensor]:
    """Let the q rows of each work unit attend, without a mask, to the KV rows of that unit.

    Unit ``u`` pairs every q row in ``qo_indices[qo_indptr[u]:qo_indptr[u+1]]`` with every KV row in
    ``kv_indices[kv_indptr[u]:kv_indptr[u+1]]``. A q row in several units attends to the union of their KV rows
    in one softmax (a KV row listed twice counts twice).

    Args:
        q: [num_rows, head_dim], bfloat16, float16 or float32.
        k_rows: [num_kv_rows, head_dim], dtype of ``q``: the arena seen as head slots.
        v_rows: like ``k_rows``.
        qo_indptr: [num_units + 1], int32 or int64, ascending from 0.
        qo_indices: [qo_indptr[-1]], int32 or int64.
        kv_indptr: [num_units + 1], int32 or int64, ascending from 0.
        kv_indices: [kv_indptr[-1]], int32 or int64.
        sm_scale: softmax scale.

    Returns:
        out [num_rows, head_dim], dtype of ``q``, and lse [num_rows], float32, natural log-sum-exp of the scaled
        scores. Rows that attend to nothing: 0 and -inf.

    Raises:
        ValueError: wrong shape, dtype or device; on the CPU also indices out of range.

    Source: split-KV decoding (Flash-Decoding); per-head runs as in FlashInfer's variable block sparse attention.
    Cost: KV rows of a unit are read once for all its q rows; float32 sums. Planning reads a few totals back from
        the device: keep the plan where the lists stay (:func:`plan_ragged_attention`).
    """
    check_tensor("q", q, (None, None), KV_DTYPES)
    check_tensor("k_rows", k_rows, (None, q.shape[1]), q.dtype, q.device)
    check_tensor("qo_indptr", qo_indptr, (None,), INDEX_DTYPES, q.device)
    plan = plan_ragged_attention(
        qo_indptr=qo_indptr,
        qo_indices=qo_indices,
        kv_indptr=kv_indptr,
        kv_indices=kv_indices,
        num_rows=q.shape[0],
    )
    check_index_range("kv_indices", kv_indices, k_rows.shape[0])
    return run_ragged_attention(plan, q, k_rows, v_rows, sm_scale=sm_scale)


def plan_ragged_attention(
    *, qo_indptr: Tensor, qo_indices: Tensor, kv_indptr: Tensor, kv_indices: Tensor, num_rows: int
) -> CpuPlan | TritonPlan:
    """Turn the index lists of :func:`ragged_attention` into a work list for the device they are on.

    Args:
        qo_indptr: see :func:`ragged_attention`.
        qo_indices: see :func:`ragged_attention`.
        kv_indptr: see :func:`ragged_attention`.
        kv_indices: see :func:`ragged_attention`; referenced by the plan, not copied, on a device.
        num_rows: rows of ``q``.

    Raises:
        ValueError: wrong shape, dtype or device; on the CPU also lists that contradict each other.
    """
    check_tensor("qo_indptr", qo_indptr, (None,), INDEX_DTYPES)
    device = qo_indptr.device
    num_units = qo_indptr.numel() - 1
    if num_units < 0:
        raise ValueError("qo_indptr: expected at least one element, got none")
    check_tensor("kv_indptr", kv_indptr, (num_units + 1,), INDEX_DTYPES, device)
    check_tensor("qo_indices", qo_indices, (None,), INDEX_DTYPES, device)
    check_tensor("kv_indices", kv_indices, (None,), INDEX_DTYPES, device)
    check_index_range("qo_indices", qo_indices, num_rows)
    _check_indptr("qo_indptr", qo_indptr, qo_indices.numel())
    _check_indptr("kv_indptr", kv_indptr, kv_indices.numel())
    if backend_for(device) == "cpu":
        return plan_cpu(qo_indptr, qo_indices, kv_indptr, kv_indices, num_rows)
    from kvevict_kernels.ragged_attention.triton_impl import plan_triton

    return plan_triton(qo_indptr, qo_indices, kv_indptr, kv_indices, num_rows)


def run_ragged_attention(
    plan: CpuPlan | TritonPlan, q: Tensor, k_rows: Tensor, v_rows: Tensor, *, sm_scale: float
) -> tuple[Tensor, Tensor]:
    """Attend as planned; arguments and result as in :func:`ragged_attention`.

    Raises:
        ValueError: wrong shape, dtype or device.
    """
    check_tensor("q", q, (plan.num_rows, None), KV_DTYPES)
    check_tensor("k_rows", k_rows, (None, q.shape[1]), q.dtype, q.device)
    check_tensor("v_rows", v_rows, tuple(k_rows.shape), q.dtype, q.device)
    if not math.isfinite(sm_scale) or sm_scale <= 0:
        raise ValueError(f"sm_scale: expected a finite number > 0, got {sm_scale!r}")
    if isinstance(plan, CpuPlan):
        return run_cpu(plan, q, k_rows, v_rows, sm_scale)
    from kvevict_kernels.ragged_attention.triton_impl import run_triton

    return run_triton(plan, q, k_rows, v_rows, sm_scale)


def _check_indptr(name: str, indptr: Tensor, total: int) -> None:
    if indptr.device.type != "cpu":
        return
    ends = (int(indptr[0]), int(indptr[-1]))
    if ends != (0, total) or bool((indptr.diff() < 0).any()):
        raise ValueError(f"{name}: expected ascending offsets from 0 to {total}, got {ends[0]} to {ends[1]}")
