"""Limits of a GPU, which determine how many programs of a compiled kernel are resident."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

RESERVED_SHARED = 1024
"""Bytes of shared memory that CUDA reserves per resident program."""
REGISTERS_PER_SM = 65536
"""32-bit registers of a multiprocessor, for compute capabilities 5.0 to 12.1."""
DEPENDENT_ARCH = 90
"""From it on a kernel may be launched while the one before it still runs (programmatic dependent launch)."""
REGISTER_UNIT = 8
"""Registers of a thread are allocated in multiples of this."""


@dataclass(frozen=True)
class DeviceLimits:
    """The limits of one GPU by which kernels are sized."""

    arch: int  # compute capability as one number: 90 is 9.0
    num_sms: int  # multiprocessors
    shared_per_sm: int  # bytes of shared memory per multiprocessor
    threads_per_sm: int = 2048  # resident threads per multiprocessor, at most

    @property
    def shared_per_block(self) -> int:
        """Maximum bytes of shared memory of one program."""
        return self.shared_per_sm - RESERVED_SHARED

    def programs_per_sm(self, *, registers: int, shared: int, num_warps: int) -> int:
        """Programs of a compiled kernel that are resident at once on one multiprocessor; at least 1.

        ``registers`` are per thread, ``shared`` are bytes per program.
        """
        threads = 32 * num_warps
        by_registers = REGISTERS_PER_SM // (-(-registers // REGISTER_UNIT) * REGISTER_UNIT * threads)
        by_shared = self.shared_per_sm // (shared + RESERVED_SHARED)
        return max(1, min(by_registers, by_shared, self.threads_per_sm // threads))


INTERPRETER = DeviceLimits(arch=90, num_sms=2, shared_per_sm=233472)
"""Limits used on a CPU, where Triton's interpreter runs programs one after the other."""


@lru_cache
def limits_of(device: torch.device) -> DeviceLimits:
    """Limits of a device, read once from the driver; ``INTERPRETER`` on a CPU."""
    if device.type != "cuda":
        return INTERPRETER
    found = torch.cuda.get_device_properties(device)
    return DeviceLimits(
        arch=10 * found.major + found.minor,
        num_sms=found.multi_processor_count,
        shared_per_sm=found.shared_memory_per_multiprocessor,
        threads_per_sm=found.max_threads_per_multi_processor,
    )


def dependent_launch(device: torch.device) -> dict[str, bool]:
    """Arguments of a kernel that may be launched while the one before it runs; ``PDL`` alone where that is missing."""
    if device.type == "cuda" and limits_of(device).arch >= DEPENDENT_ARCH:
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}
