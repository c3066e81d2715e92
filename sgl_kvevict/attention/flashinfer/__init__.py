"""Attention on an NVIDIA GPU by FlashInfer."""

from __future__ import annotations
