"""Move the K and V rows that survive an eviction into the head slots of their segment, in place."""

from __future__ import annotations

import torch
from torch import Tensor

from kvevict_kernels.checks import FP8, KV_DTYPES, check_index_range, check_tensor
from kvevict_kernels.compact_kv.cpu import compact_kv_cpu
from kvevict_kernels.compact_kv.reference import compact_kv_reference
from kvevict_kernels.dispatch import backend_for

__all__ = ["compact_kv", "compact_kv_reference"]


def compact_kv(
    k_arena: Tensor,
    v_arena: Tensor,
    src: Tensor,
    dst: Tensor,
    *,
    indptr: Tensor | None = None,
    weights: Tensor | None = None,
) -> None:
    """Move rows, or weighted sums of rows, of both arenas to new head slots.

    Without weights row ``dst[i]`` becomes the old row ``src[i]``, bit for bit. With them it becomes
    ``sum(weights[j] * old row src[j] for j in [indptr[i], indptr[i + 1]))``, summed in float32 in ascending
    ``j``, rounded once, the same weights for K and V; an empty run gives zeros. *Old* is the content before
    the call: ``src`` and ``dst`` may overlap in any way.

    A row whose source lies in a token slot that the call writes is first gathered into a temporary, and so is every
    weighted sum; the other rows move directly. So no order of the moves can be wrong. (The CPU path gathers every
    row. Hole filling needs no temporary, but then entries could not lie in run order.) Columns never mix, so both
    paths work through column groups, K then V, and the temporary stays within a limit however many rows move.

    Args:
        k_arena: [num_layers, num_token_slots, num_kv_heads, head_dim], bfloat16, float16, float32 or float8_e4m3fn.
        v_arena: like ``k_arena``.
        src: [M], int32, head slots to read; may repeat.
        dst: [C], int32, head slots to write, all different; C == M without weights.
        indptr: [C + 1], int32, runs of ``src`` and ``weights`` per written row, from 0 to M; with weights
            only.
        weights: [M], float32; with ``indptr`` only.

    Raises:
        ValueError: wrong shape, dtype or device; only one of ``indptr`` and ``weights``; on the CPU also a
            head slot outside the arena, a repeated ``dst``, an ``indptr`` that does not ascend from 0 to M.

    Source: merging after D2O (arXiv 2406.13035); the moves themselves are a scheme of this project.
    Cost: reads M and writes C rows of K and of V; on a device, rows that go through the temporary are written and
        read once more, on the CPU all rows; no host sync on a device; deterministic, no atomics.
    """
    check_tensor("k_arena", k_arena, (None, None, None, None), (*KV_DTYPES, FP8))
    device = k_arena.device
    check_tensor("v_arena", v_arena, tuple(k_arena.shape), k_arena.dtype, device)
    check_tensor("src", src, (None,), torch.int32, device)
    if (indptr is None) != (weights is None):
        given = "indptr" if weights is None else "weights"
        raise ValueError(f"indptr, weights: expected both or neither, got {given} only")
    num_moves = src.numel() if indptr is None else None
    check_tensor("dst", dst, (num_moves,), torch.int32, device)
    if indptr is not None and weights is not None:
        check_tensor("indptr", indptr, (dst.numel() + 1,), torch.int32, device)
        check_tensor("weights", weights, (src.numel(),), torch.float32, device)
    num_rows = k_arena.shape[:3].numel()
    check_index_range("src", src, num_rows)
    check_index_range("dst", dst, num_rows)
    if dst.numel() == 0:
        return
    if backend_for(device) == "cpu":
        compact_kv_cpu(k_arena, v_arena, src, dst, indptr, weights)
        return
    from kvevict_kernels.compact_kv.triton_impl import compact_kv_triton

    compact_kv_triton(k_arena, v_arena, src, dst, indptr, weights)
