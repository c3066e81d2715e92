"""Attention on a CPU: one compiled call per layer (numba), or plain PyTorch."""
