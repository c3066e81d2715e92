"""Puts :mod:`models.recurrent.kernels` in the place of SGLang's kernels; an entry point of SGLang's plugins."""

from __future__ import annotations

import importlib

from models.recurrent import kernels

PLACES = {
    "sglang.srt.layers.attention.mamba.mamba": (
        "causal_conv1d_fn",
        "causal_conv1d_update",
        "mamba_chunk_scan_combined",
        "selective_state_update",
    ),
    "sglang.srt.layers.attention.linear.gdn_backend": ("causal_conv1d_fn", "causal_conv1d_update", "fused_gdn_gating"),
    "sglang.srt.layers.attention.linear.kernels.gdn_triton": (
        "chunk_gated_delta_rule",
        "fused_recurrent_gated_delta_rule_packed_decode",
    ),
    "sglang.srt.layers.attention.hybrid_linear_attn_backend": (
        "track_mamba_states_if_needed",
        "track_mamba_states_all_layers",
    ),
    "sglang.srt.models.qwen2_moe": ("fused_gate_sigmoid_mul_add",),
    "sglang.srt.models.qwen3_5": ("fused_sigmoid_mul",),
}
"""Modules that call a kernel by these names."""


def register() -> None:
    """Put the definitions in place, and say that snapshots of states can be taken (``extra_buffer``).

    Our CPU platform does not say so itself, because no forward of recurrent layers comes with it that would take any.
    A decode step pins the mask of due snapshots, and a CPU has nothing to pin for.
    """
    import torch
    from sglang.kernels.ops.attention.fla.fused_norm_gate import FusedRMSNormGated
    from sglang.kernels.ops.attention.fla.layernorm_gated import RMSNorm

    from sgl_kvevict.sglang_adapter.platform import KVEvictCpuPlatform

    for module, names in PLACES.items():
        for name in names:
            setattr(importlib.import_module(module), name, getattr(kernels, name))
    FusedRMSNormGated.forward = RMSNorm.forward = kernels.rms_norm_gated
    torch.Tensor.pin_memory = lambda tensor: tensor
    KVEvictCpuPlatform.support_mamba_cache_extra_buffer = lambda platform: True
