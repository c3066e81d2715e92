"""Which implementation runs: decided by the device of the tensors and by nothing else."""

from __future__ import annotations

from typing import Literal

import torch


def backend_for(device: torch.device) -> Literal["cpu", "triton"]:
    """Pick the implementation for tensors on a device.

    Args:
        device: where the tensors of the call live (the caller has checked that they agree).

    Returns:
        "triton" for CUDA devices, "cpu" for the CPU.

    Raises:
        ValueError: any other device.
    """
    if device.type == "cuda":
        return "triton"
    if device.type == "cpu":
        return "cpu"
    raise ValueError(f"device: expected cuda or cpu, got {device}")
