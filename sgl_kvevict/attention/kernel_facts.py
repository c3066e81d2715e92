"""Facts of a device, an implementation of attention and a KV pool, for the table in ``sgl_kvevict/support.py``."""

from __future__ import annotations

import importlib.util

import torch

from kvevict_kernels.span_attention import reason_not_to_run
from sgl_kvevict.support import FP8, ON_CPU, Kernels

AUTO = {"cpu": "numba", "cuda": "triton"}
"""The implementation that ``auto`` chooses per device; ``torch`` on a CPU where ``numba`` cannot run."""


def kernels_for(
    name: str,
    device: torch.device,
    dtype: torch.dtype | None = None,
    head_dim: int | None = None,
    *,
    is_latent: bool = False,
) -> Kernels:
    """The facts of a configured implementation on a device; ``dtype`` and ``head_dim`` are the pool's, if known."""
    chosen = AUTO.get(device.type, name) if name == "auto" else name
    numba_error = reason_not_to_run(head_dim) if chosen == "numba" and device.type == "cpu" else None
    dtype_name = None if dtype is None else str(dtype).removeprefix("torch.")
    reads_fp8 = dtype_name == FP8 and device.type == "cuda" and chosen == "triton"
    return Kernels(
        name,
        # Only ``auto`` falls back. Someone who asks for numba is told why it cannot run.
        "torch" if name == "auto" and numba_error is not None else chosen,
        device.type,
        numba_error,
        chosen in ON_CPU or importlib.util.find_spec(chosen) is not None,
        dtype_name,
        head_dim or 0,
        is_latent,
        # Float8 alone depends on it: Triton has no such conversion on older GPUs.
        torch.cuda.get_device_capability(device) if reads_fp8 else None,
    )
