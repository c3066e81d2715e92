"""Attention of new tokens over compressed spans and the uncompressed rest."""

from __future__ import annotations

from sgl_kvevict.attention.backend import Attention, CapturableAttention, build_attention, resolve_attention
from sgl_kvevict.attention.batch import AttentionBatch
from sgl_kvevict.attention.cpu import CpuAttention

__all__ = [
    "Attention",
    "AttentionBatch",
    "CapturableAttention",
    "CpuAttention",
    "build_attention",
    "resolve_attention",
]
