"""Argument checks that ``ragged_decode`` and ``ragged_extend`` share."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvevict_kernels.checks import FP8, KV_DTYPES, check_int, check_tensor
from kvevict_kernels.ragged_decode.tables import LayerInputs, Tables


def check_run(tables: Tables, inputs: LayerInputs, out: Tensor, lse: Tensor) -> None:
    """Require what one layer's call needs; its arenas were checked by :func:`kvevict_kernels.checks.check_arenas`.

    Raises:
        ValueError: names the argument, what was expected and what came.
    """
    q = inputs.q
    sizes = tables.sizes
    num_qo_heads, head_dim = sizes.num_kv_heads * sizes.group_size, inputs.k_arena.shape[3]
    dtypes = KV_DTYPES if inputs.k_arena.dtype == FP8 else inputs.k_arena.dtype
    # Tokens may lie apart: one token of each stands for the check.
    check_tensor("q", q[:1], (min(1, tables.num_new), num_qo_heads, head_dim), dtypes, tables.waterlines.device)
    if q.shape[0] != tables.num_new:
        raise ValueError(f"q: expected {tables.num_new} new tokens, got {q.shape[0]}")
    if inputs.sink_logits is not None:
        check_tensor("sink_logits", inputs.sink_logits, (num_qo_heads,), KV_DTYPES, q.device)
    check_int("window", inputs.window, 0, None if sizes.has_windows else 0)
    check_int("layer", inputs.layer, 0, sizes.num_layers - 1)
    for name, scale in (("sm_scale", inputs.sm_scale), ("v_scale", inputs.v_scale)):
        if not math.isfinite(scale) or scale <= 0:
            raise ValueError(f"{name}: expected a finite number > 0, got {scale!r}")
    check_tensor("out", out, tuple(q.shape), q.dtype, q.device)
    check_tensor("lse", lse, tuple(q.shape[:2]), torch.float32, q.device)
