"""The choice among the implementations of attention."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvevict_kernels.span_attention import reason_not_to_run
from sgl_kvevict.attention.interface import Attention, CapturableAttention
from sgl_kvevict.attention.refusals import NO_BIASES, cpu_reasons, flashinfer_reasons, triton_reasons
from sgl_kvevict.errors import UnsupportedSetupError
from sgl_kvevict.geometry import KVGeometry

AUTO = {"cpu": "numba", "cuda": "triton"}
"""What ``auto`` stands for on each device; ``torch`` on a CPU where ``numba`` cannot run."""
ON_CPU = ("numba", "torch")
"""Implementations for a CPU; the others are for a GPU."""
PLANNED_ON_HOST = ("flashinfer",)
"""Implementations for a GPU that are no :class:`~sgl_kvevict.attention.interface.CapturableAttention`."""

logger = logging.getLogger(__name__)


def resolve_attention(name: str, device: str, head_dim: int | None = None) -> str:
    """Resolve the configured name for a device.

    Args:
        name: ``auto``, ``numba``, ``torch``, ``triton`` or ``flashinfer``.
        device: "cpu" or "cuda".
        head_dim: of the model; None: not known yet.

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


def kernel_reasons(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> list[str]:
    """Return one sentence for everything about a model or its KV pool that the implementation has no kernels for.

    Args:
        name: as configured.
        device: of the KV pool.
        dtype: of the KV pool.
        head_dim: of the model.
    """
    chosen = AUTO.get(device.type) if name == "auto" else name
    if chosen == "triton":
        return triton_reasons(dtype, head_dim, device)
    if chosen == "flashinfer":
        return flashinfer_reasons(dtype, head_dim)
    return cpu_reasons(name, dtype)


def build_attention(
    name: str,
    geometry: KVGeometry,
    k_arena: Tensor,
    v_arena: Tensor,
    q_dtype: torch.dtype | None = None,
    biases: Tensor | None = None,
    on_all_ranks: Callable[[bool], bool] = bool,
) -> Attention:
    """Build what the configuration asks for, on the arenas' device.

    Args:
        name: ``auto``, ``numba``, ``torch``, ``triton`` or ``flashinfer``.
        geometry: sizes.
        k_arena: [num_layers, num_token_slots, num_kv_heads, head_dim], contiguous.
        v_arena: like ``k_arena``.
        q_dtype: of the queries, where the arena holds float8.
        biases: [num_layers, num_token_slots, num_kv_heads], float32, of entries of fitted spans; None: none is fitted.
        on_all_ranks: whether all tensor-parallel ranks say yes; default: there is one rank.

    Raises:
        UnsupportedSetupError: see :func:`resolve_attention`; the implementation cannot read biases; or 'flashinfer'
            was asked for and cannot compile its kernels.
    """
    chosen = resolve_attention(name, k_arena.device.type, geometry.head_dim)
    if chosen == "torch" and name == "auto":
        logger.warning("attention is 'torch', which takes longer: %s", reason_not_to_run(geometry.head_dim))
    return _BUILDERS[chosen](_Wanted(geometry, k_arena, v_arena, q_dtype, biases, on_all_ranks))


@dataclass(frozen=True)
class _Wanted:
    """Arguments of :func:`build_attention` besides the name."""

    geometry: KVGeometry
    k_arena: Tensor
    v_arena: Tensor
    q_dtype: torch.dtype | None = None
    biases: Tensor | None = None
    on_all_ranks: Callable[[bool], bool] = bool


def _build_numba(wanted: _Wanted) -> Attention:
    from sgl_kvevict.attention.cpu.numba_attention import NumbaAttention

    return NumbaAttention(wanted.geometry, wanted.k_arena, wanted.v_arena, wanted.biases)


def _build_torch(wanted: _Wanted) -> Attention:
    from sgl_kvevict.attention.cpu.torch_attention import TorchAttention

    return TorchAttention(wanted.geometry, wanted.k_arena, wanted.v_arena, wanted.biases)


def _build_triton(wanted: _Wanted) -> CapturableAttention:
    from sgl_kvevict.attention.flashinfer.prefill import find_plain_prefill
    from sgl_kvevict.attention.triton.attention import TritonAttention

    arenas = wanted.geometry, wanted.k_arena, wanted.v_arena
    on_gpu = wanted.k_arena.is_cuda
    plain_prefill = find_plain_prefill(*arenas, wanted.on_all_ranks) if on_gpu else None
    attention = TritonAttention(*arenas, wanted.q_dtype, plain_prefill, wanted.biases)
    if on_gpu:
        attention.warm_up()
    return attention


def _build_flashinfer(wanted: _Wanted) -> Attention:
    if wanted.biases is not None:
        raise UnsupportedSetupError([NO_BIASES])
    from sgl_kvevict.attention.by_window import ByWindow
    from sgl_kvevict.attention.flashinfer.attention import FlashInferAttention

    if not wanted.geometry.full_layers:
        return _build_triton(wanted)
    full = FlashInferAttention(replace(wanted.geometry, windows=()), wanted.k_arena, wanted.v_arena)
    full.warm_up()
    return ByWindow(full, _build_triton(wanted)) if wanted.geometry.has_windows else full


_BUILDERS: dict[str, Callable[[_Wanted], Attention]] = {
    "numba": _build_numba,
    "torch": _build_torch,
    "triton": _build_triton,
    "flashinfer": _build_flashinfer,
}
