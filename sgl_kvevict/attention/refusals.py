"""Limits of each implementation, as sentences for the user, known before anything is built."""

from __future__ import annotations

import torch

from kvevict_kernels.checks import FP8
from sgl_kvevict.machine import FP8_CAPABILITY

MAX_HEAD_DIM = 256
MAX_LATENT_DIM = 576
FLASHINFER_HEAD_DIMS = (64, 128, 256)
DTYPES_16 = (torch.bfloat16, torch.float16)
DTYPES_CPU = (*DTYPES_16, torch.float32)
NO_LATENTS = (
    "attention is 'flashinfer', and the model keeps latents (MLA): the kernels that we call would read keys and values "
    "as rows of one width, which a latent's are not; 'triton' reads them"
)


def cpu_reasons(name: str, dtype: torch.dtype) -> list[str]:
    """Return one sentence per limit of the CPU implementations that this KV pool exceeds."""
    if dtype in DTYPES_CPU:
        return []
    return [f"attention {name!r} on a CPU needs bfloat16, float16 or float32 KV; {_pool_dtype(dtype)}"]


def triton_reasons(dtype: torch.dtype, head_dim: int, device: torch.device, *, is_latent: bool = False) -> list[str]:
    """Return one sentence per property that our kernels lack; on a CPU (interpreted, in tests) float32 is allowed."""
    reasons = []
    if is_latent and head_dim > MAX_LATENT_DIM:
        reasons.append(
            f"attention 'triton' needs latents of at most {MAX_LATENT_DIM} numbers, the rotated key included; the "
            f"model's have {head_dim}"
        )
    elif not is_latent and head_dim > MAX_HEAD_DIM:
        reasons.append(f"attention 'triton' needs a head_dim of at most {MAX_HEAD_DIM}; the model's is {head_dim}")
    if is_latent and dtype == FP8:
        reasons.append(
            "attention 'triton' needs 16-bit latents (MLA): SGLang writes float8 ones without the layers' scales, by "
            f"which our kernels multiply; {_pool_dtype(dtype)}"
        )
    if device.type == "cuda" and dtype not in (*DTYPES_16, FP8):
        reasons.append(f"attention 'triton' needs bfloat16, float16 or fp8_e4m3 KV on a GPU; {_pool_dtype(dtype)}")
    if device.type == "cuda" and dtype == FP8 and (found := torch.cuda.get_device_capability(device)) < FP8_CAPABILITY:
        reasons.append(
            "fp8_e4m3 KV needs a GPU of compute capability 8.9 or newer (Ada, Hopper, Blackwell); this one's is "
            f"{found[0]}.{found[1]} (start with --kv-cache-dtype auto)"
        )
    return reasons


def flashinfer_reasons(dtype: torch.dtype, head_dim: int) -> list[str]:
    """Return one sentence per property that FlashInfer's kernels lack."""
    reasons = []
    if head_dim not in FLASHINFER_HEAD_DIMS:
        reasons.append(f"attention 'flashinfer' needs a head_dim of 64, 128 or 256; the model's is {head_dim}")
    if dtype not in DTYPES_16:
        reasons.append(f"attention 'flashinfer' needs bfloat16 or float16 KV; {_pool_dtype(dtype)}")
    return reasons


def _pool_dtype(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    hint = " (start with --kv-cache-dtype auto)" if name.startswith("float8") else ""
    return f"the pool's dtype is {name}{hint}"
