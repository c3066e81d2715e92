"""Choose the CPU path or the Triton path of an operation by the device of its tensors."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., object])
TRITON_DEVICES: tuple[str, ...] = ("cuda",)
"""Tests add the CPU, where Triton's interpreter runs."""


def implementation(device: torch.device, on_cpu: F, package: str) -> F:
    """Pick the path of an operation: ``on_cpu``, or ``NAME_triton`` with the same arguments.

    ``on_cpu`` is named ``NAME`` or ``NAME_cpu``. The other one is in ``triton_impl.py`` of the operation's folder
    ``package``; Triton is imported when it is first picked. ValueError: the device is neither CUDA nor the CPU.
    """
    if device.type in TRITON_DEVICES:
        # Imported here: Triton is missing on a CPU, and takes seconds elsewhere.
        on_device: Any = import_module(f"kvevict_kernels.{package}.triton_impl")
        name = on_cpu.__name__.removesuffix("_cpu") + "_triton"
        found: F = getattr(on_device, name)
        return found
    if device.type != "cpu":
        raise ValueError(f"device: expected cuda or cpu, got {device}")
    return on_cpu
