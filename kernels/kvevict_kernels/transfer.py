"""Asynchronous copies from the host."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to a device without waiting; on the CPU it is returned as is.

    A GPU reads from a pinned copy, which torch's allocator keeps until the copy is done.
    """
    # From pageable memory the copy would wait for the device, within a step.
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)
