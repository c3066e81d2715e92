"""Argument checks of the public kernel functions; every failure is a ValueError that names the argument."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

KV_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Allowed dtypes of queries and of stored KV rows."""
FP8 = torch.float8_e4m3fn
"""Also allowed for stored KV rows: values are multiplied by the layer's scale."""


def check_tensor(
    name: str,
    x: object,
    shape: Sequence[int | None],
    dtype: torch.dtype | tuple[torch.dtype, ...],
    device: torch.device | None = None,
) -> None:
    """Require a contiguous tensor of the given shape and dtype, on the given device; None allows any size or device.

    ``dtype`` may be one or several. Host only: no device is read.
    """
    allowed = dtype if isinstance(dtype, tuple) else (dtype,)
    if not isinstance(x, torch.Tensor):
        got = type(x).__name__
        raise ValueError(f"{name}: expected a tensor {_show_shape(shape)}, got {got}")
    fits = x.ndim == len(shape)
    for wanted_size, size in zip(shape, x.shape, strict=False):
        fits = fits and wanted_size in (None, size)
    if not fits:
        raise ValueError(f"{name}: expected shape {_show_shape(shape)}, got {_show_shape(x.shape)}")
    if x.dtype not in allowed:
        wanted = " or ".join(str(d).removeprefix("torch.") for d in allowed)
        raise ValueError(f"{name}: expected dtype {wanted}, got {str(x.dtype).removeprefix('torch.')}")
    if device is not None and x.device != device:
        raise ValueError(f"{name}: expected device {device}, got {x.device}")
    if not x.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, got strides {x.stride()} for {_show_shape(x.shape)}")


def is_latent(k_arena: torch.Tensor, v_arena: torch.Tensor) -> bool:
    """Whether values are the first numbers of the keys' rows."""
    width = v_arena.shape[-1]
    # By memory, not by width: values that are as wide as keys may still be a part of them.
    return v_arena.data_ptr() == k_arena.data_ptr() and (
        (v_arena.shape, v_arena.stride(), v_arena.dtype)
        == ((*k_arena.shape[:-1], width), k_arena.stride(), k_arena.dtype)
    )


def check_scoring(
    queries: torch.Tensor,
    k_buffer: torch.Tensor,
    token_slots: torch.Tensor,
    *,
    sm_scale: float,
    key_start: int,
    query_start: int,
) -> None:
    """Require the arguments of an operation that scores the keys of one layer by queries.

    Shapes and dtypes are those of :func:`kvevict_kernels.key_scores.accumulated_attention`; ``sm_scale`` is finite and
    > 0, positions are >= 0, and token slots (checked on the CPU only) lie inside the buffer.
    """
    check_tensor("queries", queries, (None, None, None), KV_DTYPES)
    num_qo_heads, head_dim = queries.shape[1:]
    check_tensor("k_buffer", k_buffer, (None, None, head_dim), (*KV_DTYPES, FP8), queries.device)
    check_tensor("token_slots", token_slots, (None,), torch.int64, queries.device)
    num_kv_heads = k_buffer.shape[1]
    if num_kv_heads == 0 or num_qo_heads == 0 or num_qo_heads % num_kv_heads:
        raise ValueError(f"queries: expected a multiple of {num_kv_heads} KV heads, got {num_qo_heads} heads")
    if not math.isfinite(sm_scale) or sm_scale <= 0:
        raise ValueError(f"sm_scale: expected a finite number > 0, got {sm_scale!r}")
    check_int("key_start", key_start, 0)
    check_int("query_start", query_start, 0)
    check_index_range("token_slots", token_slots, k_buffer.shape[0])


def check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    """Require an int (not a bool) in ``[low, high]``."""
    upper = "" if high is None else f" and <= {high}"
    # True is an int in Python.
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        raise ValueError(f"{name}: expected an int >= {low}{upper}, got {value!r}")


def check_choice(name: str, value: object, allowed: Sequence[str]) -> None:
    """Require one of the allowed words."""
    if value not in allowed:
        raise ValueError(f"{name}: expected one of {', '.join(allowed)}, got {value!r}")


def check_index_range(name: str, x: torch.Tensor, size: int) -> None:
    """Require every element of an index tensor in ``[0, size)``.

    Checked on the CPU only: reading a device would stall the stream.
    """
    if x.device.type != "cpu" or x.numel() == 0:
        return
    low, high = map(int, torch.aminmax(x))
    if low < 0 or high >= size:
        raise ValueError(f"{name}: expected indices in [0, {size}), got {low} to {high}")


def _show_shape(shape: Sequence[int | None]) -> str:
    return "[" + ", ".join("any" if size is None else str(size) for size in shape) + "]"
