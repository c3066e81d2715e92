"""Choose and build an implementation of attention."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from kvevict_kernels.span_attention import reason_not_to_run
from sgl_kvevict.attention.cpu.torch_attention import TorchAttention
from sgl_kvevict.attention.interface import Attention, CapturableAttention
from sgl_kvevict.attention.refusals import NO_LATENTS, cpu_reasons, flashinfer_reasons, triton_reasons
from sgl_kvevict.errors import UnsupportedSetupError
from sgl_kvevict.geometry import KVGeometry

AUTO = {"cpu": "numba", "cuda": "triton"}
"""The implementation that ``auto`` chooses per device; ``torch`` on a CPU where ``numba`` cannot run."""
ON_CPU = ("numba", "torch")
"""Implementations for a CPU; the others are for a GPU."""
PLANNED_ON_HOST = ("flashinfer",)
"""Implementations for a GPU that are no :class:`~sgl_kvevict.attention.interface.CapturableAttention`."""

logger = logging.getLogger(__name__)


def resolve_attention(name: str, device: str, head_dim: int | None = None) -> str:
    """Resolve the configured name (``auto``, ``numba``, ``torch``, ``triton`` or ``flashinfer``) for "cpu" or "cuda".

    ``head_dim`` is the model's; None: not yet known.

    Raises:
        UnsupportedSetupError: the implementation does not run there, or its package is missing.
    """
    if device not in AUTO:
        raise UnsupportedSetupError([f"the device is {device!r}; attention runs on 'cpu' and 'cuda'"])
    chosen = AUTO[device] if name == "auto" else name
    if (chosen in ON_CPU) != (device == "cpu"):
        where = "the CPU" if chosen in ON_CPU else "a CUDA device"
        allowed = "'auto', 'numba', 'torch'" if device == "cpu" else "'auto', 'triton', 'flashinfer'"
        raise UnsupportedSetupError(
            [f"attention is {name!r}, which runs on {where} only; the device is {device!r} (allowed: {allowed})"]
        )
    if chosen == "numba" and (reason := reason_not_to_run(head_dim)) is not None:
        if name != "auto":
            raise UnsupportedSetupError([f"attention is {name!r}, but {reason} ('torch' runs everywhere)"])
        return "torch"
    if device == "cuda" and importlib.util.find_spec(chosen) is None:
        raise UnsupportedSetupError([f"attention is {name!r}, but the package {chosen} is not installed"])
    return chosen


def kernel_reasons(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int, *, is_latent: bool = False
) -> list[str]:
    """Return one sentence per property of the model or its KV pool for which implementation ``name`` has no kernels."""
    chosen = AUTO.get(device.type) if name == "auto" else name
    if chosen == "triton":
        return triton_reasons(dtype, head_dim, device, is_latent=is_latent)
    if chosen == "flashinfer":
        return [NO_LATENTS] if is_latent else flashinfer_reasons(dtype, head_dim)
    return cpu_reasons(name, dtype)


def build_attention(
    name: str,
    geometry: KVGeometry,
    k_arena: Tensor,
    v_arena: Tensor,
    q_dtype: torch.dtype | None = None,
    on_all_ranks: Callable[[bool], bool] = bool,
    *,
    verifies: bool = False,
) -> Attention:
    """Build the configured implementation on the arenas' device.

    Args:
        name: ``auto``, ``numba``, ``torch``, ``triton`` or ``flashinfer``.
        geometry: sizes.
        k_arena: [num_layers, num_token_slots, num_kv_heads, head_dim], contiguous.
        v_arena: like ``k_arena``, or the first ``geometry.latent_dim`` columns of its rows.
        q_dtype: of the queries, where the arena holds float8.
        on_all_ranks: whether a condition holds on all tensor-parallel ranks; default: there is one rank.
        verifies: some batches are trees of draft tokens (:attr:`AttentionBatch.visible`).

    Raises:
        UnsupportedSetupError: see :func:`resolve_attention`; or 'flashinfer' is configured, and the model keeps latents
            or its kernels cannot be compiled.
    """
    chosen = resolve_attention(name, k_arena.device.type, geometry.head_dim)
    if chosen == "torch" and name == "auto":
        logger.warning("attention is 'torch', which takes longer: %s", reason_not_to_run(geometry.head_dim))
    if chosen == "numba":
        from sgl_kvevict.attention.cpu.numba_attention import NumbaAttention

        return NumbaAttention(geometry, k_arena, v_arena)
    if chosen == "torch":
        return TorchAttention(geometry, k_arena, v_arena)
    triton = partial(_build_triton, geometry, k_arena, v_arena, q_dtype, on_all_ranks, verifies)
    if chosen == "triton":
        return triton()
    if geometry.is_latent:
        raise UnsupportedSetupError([NO_LATENTS])
    return _build_flashinfer(geometry, k_arena, v_arena, triton, verifies=verifies)


def _build_flashinfer(
    geometry: KVGeometry, k_arena: Tensor, v_arena: Tensor, triton: Callable[[], CapturableAttention], *, verifies: bool
) -> Attention:
    """FlashInfer for layers without a window; ``triton`` builds our own attention for the others and for trees."""
    from sgl_kvevict.attention.by_window import ByWindow
    from sgl_kvevict.attention.flashinfer.attention import FlashInferAttention

    if not geometry.full_layers:
        return triton()
    plain = FlashInferAttention(replace(geometry, windows=()), k_arena, v_arena)
    plain.warm_up()
    return ByWindow(plain, triton()) if geometry.has_windows or verifies else plain


def _build_triton(
    geometry: KVGeometry,
    k_arena: Tensor,
    v_arena: Tensor,
    q_dtype: torch.dtype | None,
    on_all_ranks: Callable[[bool], bool],
    verifies: bool,
) -> CapturableAttention:
    from sgl_kvevict.attention.flashinfer.prefill import find_plain_prefill
    from sgl_kvevict.attention.triton.attention import TritonAttention

    on_gpu = k_arena.is_cuda
    plain_prefill = find_plain_prefill(geometry, k_arena, v_arena, on_all_ranks) if on_gpu else None
    attention = TritonAttention(geometry, k_arena, v_arena, q_dtype, plain_prefill, verifies=verifies)
    if on_gpu:
        attention.warm_up()
    return attention
