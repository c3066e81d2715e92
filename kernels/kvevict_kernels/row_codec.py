"""Rows of 4 bits, four of them in the place of one row of 16 bits: the definition, in torch.

A row of ``head_dim`` numbers is written in three steps:

1. Its numbers are normalised by statistics of the model, ``(x - mean) / scale``, per layer, KV head and channel, so
   that rows are independent of each other, and have a mean square of about 1.
2. They are turned by :func:`rotation`, which spreads a number that stands out over all channels.
3. They are divided by a step that is a share of the largest one, and ``code = number / step + 7.5``, rounded half up,
   in 0 .. 15. The row's step is then the one with which these codes come nearest to the numbers, in bfloat16.

What is read is ``(code - 7.5) * step``; the rotation is its own inverse. In an arena, row ``r`` begins at byte
``r * head_dim / 2``: code ``i`` is its ``i``-th group of four bits, the lower half of a byte first. Steps lie in an
array of their own, by row number (:class:`RowCoding`). Outside of an arena a row is its codes, then its step.

Queries are turned once instead of all keys, and sums of values once instead of all values:

* score: ``step * (turned . code - 7.5 * sum(turned)) + q . mean`` with ``turned = rotation(q * scale)``;
* output: ``rotation(sum of weight * step * (code - 7.5)) * scale + mean * sum of weights``.

Source: rotation before rounding as QuaRot (arXiv 2404.00456) and TurboQuant (arXiv 2504.19874) have it; keys' scale, by
    which what queries see of the noise is least: this project.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache, cached_property

import torch
from torch import Tensor

from kvevict_kernels.checks import check_tensor
from kvevict_kernels.row_sizes import GROUP, ROWS_IN_PLACE, STEP_BYTES

DTYPES = (torch.bfloat16, torch.float16)
"""Of pools that may have rows of 4 bits."""
MAX_CODE = 15
MIDDLE = 7.5
"""Code of the number 0."""
REACH = 0.93
"""Part of a row's largest number that the largest code reaches, before the step is fitted: the noise of all numbers
falls by more than what the largest one loses."""
LEAST_STEP = 1e-30
"""Of the rows with smaller numbers, zeros above all, every code is that of the middle."""
MAX_NUMBER = 65504.0
"""Largest normalised number before it is turned; larger ones saturate."""


@dataclass(frozen=True, eq=False)
class RowStatistics:
    """Means and scales by which a model's keys (as stored, after RoPE) and values are normalised.

    All are [num_layers, num_kv_heads, head_dim], float32, contiguous, on the pool's device.

    Raises:
        ValueError: another shape, dtype or device; on the CPU also a mean that is not finite, or a scale that is
            not finite and > 0.
    """

    k_mean: Tensor
    k_scale: Tensor
    v_mean: Tensor
    v_scale: Tensor

    @classmethod
    def neutral(cls, shape: Sequence[int], device: torch.device | None = None) -> RowStatistics:
        """Those that change no number."""
        return cls(*(torch.full(tuple(shape), value, device=device) for value in (0.0, 1.0, 0.0, 1.0)))

    def of_runs(self, runs: Tensor, *, is_v: bool) -> tuple[Tensor, Tensor]:
        """Means and scales of keys or of values, of runs ``layer * num_kv_heads + head`` ([n], int): [n, head_dim]."""
        both = (self.v_mean, self.v_scale) if is_v else (self.k_mean, self.k_scale)
        mean, scale = (found.flatten(0, 1).index_select(0, runs) for found in both)
        return mean, scale

    @cached_property
    def table(self) -> Tensor:
        """[head_dim + 4 * num_runs, head_dim], for kernels: the rotation, then four rows of each run.

        These are mean and scale of keys, then of values.
        """
        return torch.cat([rotation(self.k_mean.shape[-1], self.k_mean.device), self._by_run()])

    def _by_run(self) -> Tensor:
        return torch.stack([self.k_mean, self.k_scale, self.v_mean, self.v_scale], dim=2).flatten(0, 2)

    def assign(self, other: RowStatistics) -> None:
        """Take over other numbers of the same shape, in place: who reads these reads those from now on."""
        for field in fields(self):
            getattr(self, field.name).copy_(getattr(other, field.name))
        # The table is a copy, and kernels have its address.
        self.table[self.k_mean.shape[-1] :].copy_(self._by_run())

    def __post_init__(self) -> None:
        shape, device = tuple(self.k_mean.shape), self.k_mean.device
        check_tensor("k_mean", self.k_mean, (None, None, None), torch.float32)
        for field in fields(self):
            found = getattr(self, field.name)
            check_tensor(field.name, found, shape, torch.float32, device)
            if device.type != "cpu" or not found.numel():
                continue
            if not bool(found.isfinite().all()):
                raise ValueError(f"{field.name}: expected finite numbers")
            if field.name.endswith("scale") and float(found.min()) <= 0:
                raise ValueError(f"{field.name}: expected numbers > 0, got {float(found.min())}")


@dataclass(frozen=True, eq=False)
class RowCoding:
    """With what rows of 4 bits of one pool are written and read.

    Attributes:
        statistics: of the model.
        k_steps: [num_head_slots * rows_per_slot], bfloat16, on the pool's device: steps of its keys' rows, by number.
        v_steps: of its values' rows.
    """

    statistics: RowStatistics
    k_steps: Tensor
    v_steps: Tensor

    @classmethod
    def of(cls, arena: Tensor, statistics: RowStatistics) -> RowCoding:
        """One for an arena of keys and its twin of values, whose rows of 4 bits are yet to be written."""
        num_rows = arena.shape[:3].numel() * ROWS_IN_PLACE
        coding = cls(statistics, *torch.zeros(2, num_rows, dtype=torch.bfloat16, device=arena.device))
        check_coding(arena, coding)
        return coding

    def steps(self, is_v: int) -> Tensor:
        """Those of keys' rows (0) or of values' (1)."""
        return self.v_steps if is_v else self.k_steps

    @property
    def num_bytes(self) -> int:
        """Of the steps."""
        return 2 * STEP_BYTES * self.k_steps.numel()

    def load(self, arena: Tensor, rows: Tensor, runs: Tensor, *, is_v: bool) -> Tensor:
        """Numbers of rows of 4 bits ([n], int) of runs ([n], or [1] for all) in one arena: [n, head_dim], float32."""
        return decode_rows(read_rows(arena, rows, self.steps(is_v)), *self.statistics.of_runs(runs, is_v=is_v))


@cache
def rotation(head_dim: int, device: torch.device) -> Tensor:
    """[head_dim, head_dim], float32: an orthonormal matrix that is its own inverse, and its own transpose.

    That of Hadamard where head_dim is a power of two, else that of Hartley's transform. The same tensor each time.
    """
    if head_dim & (head_dim - 1) == 0:
        matrix = torch.ones(1, 1)
        while matrix.shape[0] < head_dim:
            matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    else:
        numbers = torch.arange(head_dim, dtype=torch.float64)
        # The remainder first: cosines of large angles would be less exact.
        angles = 2 * torch.pi / head_dim * (numbers[:, None] * numbers % head_dim)
        matrix = angles.cos() + angles.sin()
    return (matrix.double() / math.sqrt(head_dim)).float().to(device)


def normalised(x: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    """Numbers as they are encoded, turned, float32; ``mean`` and ``scale`` broadcast to ``x`` [n, head_dim].

    Those that are too large saturate, and NaN is read as the mean.
    """
    numbers = ((x.float() - mean) / scale).nan_to_num(0.0).clamp(-MAX_NUMBER, MAX_NUMBER)
    return numbers @ rotation(x.shape[-1], x.device)


def encode_rows(x: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    """Encode rows ``x`` ([n, head_dim], any floating dtype) in 4 bits: [n, head_dim / 2 + 2], uint8.

    Whatever the numbers, what is read is finite.
    """
    turned = normalised(x, mean, scale)
    first_step = (turned.abs().amax(1, keepdim=True) * (REACH / MIDDLE)).clamp_min(LEAST_STEP)
    codes = (turned / first_step + (MIDDLE + 0.5)).floor().clamp(0, MAX_CODE)
    units = codes - MIDDLE
    # Never divided by 0: no code is the middle, 7.5.
    step = (turned * units).sum(1, keepdim=True) / units.square().sum(1, keepdim=True)
    low, high = codes.to(torch.uint8).view(-1, x.shape[1] // 2, 2).unbind(2)
    return torch.cat([low | high << 4, step.bfloat16().view(torch.uint8)], dim=1)


def decode_rows(encoded: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    """Numbers of encoded rows, [n, head_dim], float32."""
    packed, step = encoded[:, :-STEP_BYTES], encoded[:, -STEP_BYTES:].contiguous().view(torch.bfloat16).float()
    codes = torch.stack([packed & MAX_CODE, packed >> 4], dim=2).flatten(1)
    turned = (codes - MIDDLE) * step
    return mean + scale * (turned @ rotation(turned.shape[1], encoded.device))


def read_rows(arena: Tensor, rows: Tensor, steps: Tensor | None = None) -> Tensor:
    """Bytes of rows: [n, :func:`~kvevict_kernels.row_sizes.row_bytes`], uint8.

    Args:
        arena: [num_layers, num_token_slots, num_kv_heads, head_dim], contiguous; numbers have 2 bytes, or 4 where no
            row has 4 bits.
        rows: [n], int, row numbers of this width.
        steps: of rows of 4 bits in this arena; None: the rows have 16 bits.
    """
    rows = rows.long()
    if steps is None:
        return _bytes(arena, arena.shape[-1] * arena.element_size()).index_select(0, rows)
    of_rows = steps.index_select(0, rows)[:, None].view(torch.uint8)
    return torch.cat([_bytes(arena, arena.shape[-1] // 2).index_select(0, rows), of_rows], dim=1)


def write_rows(arena: Tensor, rows: Tensor, encoded: Tensor, steps: Tensor | None = None) -> None:
    """Write bytes of rows, all different; arguments as for :func:`read_rows`."""
    rows = rows.long()
    if steps is None:
        _bytes(arena, arena.shape[-1] * arena.element_size()).index_copy_(0, rows, encoded)
        return
    # As words of 16 bits, which torch copies twice as fast as bytes; the last one is the step.
    words = encoded.view(torch.int16)
    arena.view(-1).view(torch.int16).view(-1, arena.shape[-1] // 4).index_copy_(0, rows, words[:, :-1])
    steps.index_copy_(0, rows, words[:, -1].view(torch.bfloat16))


def _bytes(arena: Tensor, width: int) -> Tensor:
    return arena.view(-1).view(torch.uint8).view(-1, width)


def check_coding(arena: Tensor, coding: RowCoding) -> None:
    """ValueError if a coding does not fit the arena: float16 or bfloat16, and a head_dim that is a multiple of 32."""
    num_layers, num_token_slots, num_kv_heads, head_dim = arena.shape
    if arena.dtype not in DTYPES or head_dim % GROUP:
        raise ValueError(
            f"statistics: rows of 4 bits need a pool of bfloat16 or float16 and a head_dim that is a multiple of "
            f"{GROUP}, got {str(arena.dtype).removeprefix('torch.')} and {head_dim}"
        )
    shape = (num_layers, num_kv_heads, head_dim)
    check_tensor("statistics", coding.statistics.k_mean, shape, torch.float32, arena.device)
    for name in ("k_steps", "v_steps"):
        steps = (num_layers * num_token_slots * num_kv_heads * ROWS_IN_PLACE,)
        check_tensor(name, getattr(coding, name), steps, torch.bfloat16, arena.device)
