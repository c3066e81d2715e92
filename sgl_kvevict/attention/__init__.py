"""Attention of new tokens over compressed spans and uncompressed tokens."""

from __future__ import annotations

from sgl_kvevict.attention.backend import build_attention
from sgl_kvevict.attention.batch import AttentionBatch
from sgl_kvevict.attention.cpu.torch_attention import TorchAttention
from sgl_kvevict.attention.interface import Attention, CapturableAttention
from sgl_kvevict.attention.kernel_facts import resolve_attention

__all__ = [
    "Attention",
    "AttentionBatch",
    "CapturableAttention",
    "TorchAttention",
    "build_attention",
    "resolve_attention",
]
