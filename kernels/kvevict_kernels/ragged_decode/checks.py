"""Argument checks that ``ragged_decode`` and ``ragged_extend`` share."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvevict_kernels.checks import KV_DTYPES, check_int, check_tensor
from kvevict_kernels.ragged_decode.tables import Tables


def check_run(
    tables: Tables, layer: int, q: Tensor, k_arena: Tensor, v_arena: Tensor, sm_scale: float, out: Tensor, lse: Tensor
) -> None:
    """Require what one layer's call needs.

    Raises:
        ValueError: names the argument, what was expected and what came.
    """
    num_qo_heads = tables.num_kv_heads * tables.group_size
    check_tensor("q", q, (tables.num_new, num_qo_heads, None), KV_DTYPES, tables.waterlines.device)
    arena_shape = (tables.num_layers, None, tables.num_kv_heads, q.shape[2])
    check_tensor("k_arena", k_arena, arena_shape, q.dtype, q.device)
    check_tensor("v_arena", v_arena, tuple(k_arena.shape), q.dtype, q.device)
    check_int("layer", layer, 0, tables.num_layers - 1)
    if not math.isfinite(sm_scale) or sm_scale <= 0:
        raise ValueError(f"sm_scale: expected a finite number > 0, got {sm_scale!r}")
    check_tensor("out", out, tuple(q.shape), q.dtype, q.device)
    check_tensor("lse", lse, tuple(q.shape[:2]), torch.float32, q.device)
