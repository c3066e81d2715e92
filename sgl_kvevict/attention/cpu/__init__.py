"""Attention on a CPU: one compiled call for a layer (numba), or calls of PyTorch."""

from __future__ import annotations
