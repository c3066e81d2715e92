"""Attention on an NVIDIA GPU by our own Triton kernels."""

from __future__ import annotations
