"""Attention on an NVIDIA GPU by FlashInfer."""
