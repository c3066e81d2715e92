"""How ``window_scores`` pools along the keys, on the CPU and on a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

from kvevict_kernels.checks import check_choice, check_int
from kvevict_kernels.device_limits import DeviceLimits

MAX_KERNEL_SIZE = 127
"""A tile of keys on the device must hold a whole pooling window."""
KEY_BLOCK = 128
"""Keys of a tile on a device, halo included; twice as many for a window that leaves too few others."""
MIN_VALID_KEYS = 32
"""Keys of a tile that are not halo, at least."""
WIDE_ROW_SHARED = 155648
"""Bytes of shared memory that a program with the larger tile takes where rows are 256 numbers wide (compiled)."""


def largest_kernel_size(head_dim: int, limits: DeviceLimits) -> int:
    """Widest window that a device can pool row by row: the larger tile of wide rows does not fit an sm_89.

    Args:
        head_dim: width of a key.
        limits: of the device.
    """
    if head_dim <= KEY_BLOCK or limits.shared_per_block >= WIDE_ROW_SHARED:
        return MAX_KERNEL_SIZE
    return KEY_BLOCK - MIN_VALID_KEYS - 1


@dataclass(frozen=True)
class Pooling:
    """The pooling arguments of window_scores.

    Attributes:
        kernel_size: odd window along the keys, up to 127 (tokens); 1 does not pool.
        kind: "max" (pads -inf) or "avg" (pads zeros that count).
        order: "pool-mean" or "mean-pool".

    Raises:
        ValueError: names the argument as the caller of window_scores knows it.
    """

    kernel_size: int
    kind: Literal["max", "avg"]
    order: Literal["pool-mean", "mean-pool"]

    def __post_init__(self) -> None:
        check_int("kernel_size", self.kernel_size, 1, MAX_KERNEL_SIZE)
        if self.kernel_size % 2 == 0:
            raise ValueError(f"kernel_size: expected an odd number, got {self.kernel_size}")
        check_choice("pooling", self.kind, ("max", "avg"))
        check_choice("order", self.order, ("pool-mean", "mean-pool"))

    @property
    def pools_rows(self) -> bool:
        """Whether rows must be pooled one by one; if not, pooling the mean is the same."""
        return self.kernel_size > 1 and self.kind == "max" and self.order == "pool-mean"

    @property
    def halo(self) -> int:
        """Keys that one side of a pooling window reaches beyond its centre."""
        return self.kernel_size // 2

    def pool(self, x: Tensor) -> Tensor:
        """Pool the last dimension of [rows, keys]. Returns a new float32 tensor of the same shape."""
        if self.kernel_size == 1:
            return x.clone()
        if self.kind == "max":
            return max_pool1d(x[None], self.kernel_size, stride=1, padding=self.halo)[0]
        return avg_pool1d(x[None], self.kernel_size, stride=1, padding=self.halo, count_include_pad=True)[0]
