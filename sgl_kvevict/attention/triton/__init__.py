"""Attention on an NVIDIA GPU by our own Triton kernels."""
