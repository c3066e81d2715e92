"""Argument checks of the public kernel functions; every failure is a ValueError that names the argument."""

from __future__ import annotations

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
