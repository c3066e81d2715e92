"""Compiled kernels in torch: those of ``sgl_kernel`` and of SGLang that a dense model calls. Others raise by name."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

DUAL_GEMM = "sglang.kernels.ops.gemm.cutedsl_dual_gemm"
SITE = Path(__file__).resolve().parents[3] / "tools" / "gpu_kit" / "site"
"""Has the kit's stand-in for that module, which needs a package of Blackwell's."""
PACKAGES = ("sgl_kernel", "cuda")
"""Packages of the CUDA profile that the CPU profile lacks and that are imported at the start."""


class Missing(type):
    """A class that stands for anything of a package of kernels until it is used: also ``isinstance`` may ask for it."""

    def __new__(cls, name: str) -> Missing:
        return super().__new__(cls, name, (), {})

    def __init__(self, name: str) -> None: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{self.__name__} has no stand-in on the faked GPU")

    def __getattr__(self, name: str) -> Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self.__name__}.{name}")


class StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds packages that are not installed, and their submodules: functions of this file, else :class:`Missing`."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
        if name == DUAL_GEMM:
            return importlib.util.spec_from_file_location(name, SITE / "cutedsl_dual_gemm.py")
        if name.split(".")[0] not in PACKAGES:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        return ModuleType(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__.startswith("sgl_kernel"):
            module.__dict__.update(OPERATORS)

        def missing(name: str) -> Missing:
            if name.startswith("__"):
                raise AttributeError(name)
            return Missing(f"{module.__name__}.{name}")

        module.__getattr__ = missing  # type: ignore[method-assign]


def rmsnorm(x: Tensor, weight: Tensor, eps: float = 1e-6, out: Tensor | None = None, enable_pdl: Any = None) -> Tensor:
    """Root mean square norm, computed in float32."""
    wide = x.float()
    result = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)
    return result if out is None else out.copy_(result)


def fused_add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, enable_pdl: Any = None) -> None:
    """``residual`` becomes the sum, ``x`` its norm."""
    residual.add_(x)
    x.copy_(rmsnorm(residual, weight, eps))


FA3_ARGUMENTS = (
    *("q", "k_cache", "v_cache", "k", "v", "qv", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx"),
    *("cache_leftpad", "page_table", "cu_seqlens_q", "cu_seqlens_k_new", "max_seqlen_q", "rotary_seqlens"),
    *("q_descale", "k_descale", "v_descale", "softmax_scale", "causal", "window_size"),
)
"""Of ``sgl_kernel.flash_attn.flash_attn_with_kvcache``, in order, as far as they are used here."""


def flash_attn_with_kvcache(*args: Any, **kwargs: Any) -> Any:
    """FA3, called by place or by name."""
    named = dict(zip(FA3_ARGUMENTS, args, strict=False)) | kwargs
    return paged_attention(**{name: value for name, value in named.items() if value is not None})


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    cu_seqlens_q: Tensor,
    softmax_scale: float,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    return_softmax_lse: bool = False,
    **others: Any,
) -> Any:
    """FA3's paged attention with pages of one slot; the queries of a request are its last tokens."""
    if causal is False or window_size != (-1, -1) or k_cache.shape[1] != 1:
        raise NotImplementedError("the faked FA3 is causal, without a window, with pages of one slot")
    out = torch.zeros(*q.shape[:2], v_cache.shape[-1], dtype=q.dtype)
    lse = torch.full((q.shape[1], q.shape[0]), -math.inf)
    starts = cu_seqlens_q.tolist()
    for row, (begin, end) in enumerate(itertools.pairwise(starts)):
        slots = page_table[row, : int(cache_seqlens[row])].long()
        group = q.shape[1] // k_cache.shape[2]
        k, v = (cache[slots, 0].float().repeat_interleave(group, 1) for cache in (k_cache, v_cache))
        scores = torch.einsum("thd,nhd->htn", q[begin:end].float(), k) * softmax_scale
        first = len(slots) - (end - begin)
        later = torch.arange(len(slots)) > first + torch.arange(end - begin)[:, None]
        scores = scores.masked_fill(later, -math.inf)
        out[begin:end] = torch.einsum("htn,nhd->thd", scores.softmax(-1), v).to(q.dtype)
        lse[:, begin:end] = scores.logsumexp(-1)
    return (out, lse) if return_softmax_lse else out


def merge_state_v2(a: Tensor, a_lse: Tensor, b: Tensor, b_lse: Tensor, *outs: Any) -> tuple[Tensor, Tensor]:
    """Two partial attentions as one; log-sum-exps are natural, [tokens, heads]."""
    both = torch.stack([a_lse, b_lse])
    weights = both.softmax(0)[..., None]
    return (weights[0] * a.float() + weights[1] * b.float()).to(a.dtype), both.logsumexp(0)


def rotate(tensors: Sequence[Tensor], cos_sin_cache: Tensor, positions: Tensor) -> None:
    """Rotary embedding in place, halves apart (NeoX)."""
    half = cos_sin_cache.shape[-1] // 2
    cos, sin = (part[:, None] for part in cos_sin_cache[positions.long()].float().split(half, -1))
    for x in tensors:
        first, second = x[..., :half].float(), x[..., half : 2 * half].float()
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
        x[..., : 2 * half] = turned.to(x.dtype)


def run_rope(q: Tensor, k: Tensor, cos_sin_cache: Tensor, positions: Tensor, *others: Any) -> None:
    """Queries and keys."""
    rotate((q, k), cos_sin_cache, positions)


def rotary_embedding(
    positions: Tensor, q: Tensor, k: Tensor | None, head_size: int, cos_sin_cache: Tensor, is_neox: bool
) -> None:
    """The same for rows of all heads; ``k`` may be missing."""
    assert is_neox
    rotate([x.view(len(x), -1, head_size) for x in (q, k) if x is not None], cos_sin_cache, positions)


def run_rope_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    slots: Tensor,
    *others: Any,
) -> None:
    """The same, then keys and values into the pool."""
    rotate((q, k), cos_sin_cache, positions)
    store_cache(k.reshape(len(k), *k_cache.shape[1:]), v.reshape(len(v), *v_cache.shape[1:]), k_cache, v_cache, slots)


def store_cache(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, *others: Any) -> None:
    """Rows into the pool."""
    k_cache[slots.long()], v_cache[slots.long()] = k, v


def run_activation(x: Tensor, out: Tensor, name: str) -> None:
    """An activation of the first half times the second."""
    gate, up = x.float().chunk(2, -1)
    function: Any = {"silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu}[name]
    out.copy_((function(gate) * up).to(out.dtype))


def clamp_position(out: Tensor, lengths: Tensor) -> None:
    """Position of the last token."""
    out.copy_((lengths - 1).clamp_min(0))


OPERATORS: dict[str, Any] = {
    **{each.__name__: each for each in (rmsnorm, fused_add_rmsnorm, flash_attn_with_kvcache, merge_state_v2)},
    "get_scheduler_metadata": lambda **sizes: torch.zeros(1, dtype=torch.int32),  # of no use to the stand-in
    "weak_ref_tensor": lambda x: x,
    "is_arch_support_pdl": lambda *args: False,
}
"""Of ``sgl_kernel`` and its submodules."""
COMPILED = (run_rope, run_rope_store, rotary_embedding, store_cache, run_activation, clamp_position)
"""Functions of the modules that SGLang compiles."""


def load_jit(*args: Any, **kwargs: Any) -> Any:
    """In place of SGLang's: a module with the functions above."""
    name, compiled = "_".join(map(str, args)), {each.__name__: each for each in COMPILED}
    names = [exported for exported, *_ in kwargs.get("cuda_wrappers") or []]
    return SimpleNamespace(**{each: compiled.get(each, Missing(f"{name}.{each}")) for each in names})
