"""Rows of 8 and 4 bits, two and three of them in the place of one row of 16 bits: the definition, in torch.

Numbers are first normalised by statistics of the model, ``(x - mean) / deviation``, per layer, KV head and channel, so
that rows are independent of each other, and everything of a row is inside its head slot:

=====  ==========================================================================================================
bits   a row of ``head_dim`` numbers
=====  ==========================================================================================================
16     as the pool stores them (32 where it stores float32)
8      one byte a number: float8 e4m3fn
4      per ``GROUP`` channels a scale and a minimum, both float16, and ``code = (number - minimum) / scale``, rounded
       half up, in 0 .. 15; byte ``j`` of a group holds number ``j`` in its low and ``j + GROUP / 2`` in its high half
=====  ==========================================================================================================

A *block* is the place of ``head_dim`` numbers of 16 bits, ``2 * head_dim`` bytes: a head slot of a 16-bit pool, half of
one where the pool holds float32. Blocks of an arena are numbered through; a block holds two rows of 8 bits, one after
the other, or the codes of three rows of 4 bits and then, from byte ``3 * head_dim / 2`` on, their scales and minima,
row after row, group after group. Row ``r`` is part ``r % n`` of block ``r // n``, where ``n`` rows are in a block.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

import torch
from torch import Tensor

from kvevict_kernels.checks import KV_DTYPES, check_tensor

GROUP = 32
"""Channels with one scale and one minimum; head_dim is a multiple of it where rows have fewer than 16 bits."""
WIDTHS = (16, 8, 4)
"""Bits of a number in a row."""
PARTS = {8: 2, 4: 3}
"""Rows in a block, by bits."""
MAX_CODE = 15
MAX_8 = 448.0
"""Largest number of float8 e4m3fn; larger ones saturate."""
MAX_4 = 65504.0
"""Largest number of float16, of which scales and minima are; larger ones saturate."""


MeanAndDeviation = tuple[Tensor, Tensor]
"""Statistics of some rows, float32; both broadcast to [n, head_dim]."""


@dataclass(frozen=True, eq=False)
class RowStatistics:
    """Means and deviations by which a model's keys (as stored, after RoPE) and values are normalised.

    All are [num_layers, num_kv_heads, head_dim], float32, contiguous, on the pool's device.

    Raises:
        ValueError: another shape, dtype or device; on the CPU also a mean that is not finite, or a deviation that is
            not finite and > 0.
    """

    k_mean: Tensor
    k_deviation: Tensor
    v_mean: Tensor
    v_deviation: Tensor

    def of_run(self, layer: int, head: int) -> tuple[MeanAndDeviation, MeanAndDeviation]:
        """Those of keys and of values of a layer and KV head, [head_dim] each."""
        return (
            (self.k_mean[layer, head], self.k_deviation[layer, head]),
            (self.v_mean[layer, head], self.v_deviation[layer, head]),
        )

    def of_runs(self, runs: Tensor) -> tuple[MeanAndDeviation, MeanAndDeviation]:
        """The same of runs ``layer * num_kv_heads + head`` ([n], int): [n, head_dim] each."""
        k_mean, k_deviation, v_mean, v_deviation = (
            found.flatten(0, 1).index_select(0, runs)
            for found in (self.k_mean, self.k_deviation, self.v_mean, self.v_deviation)
        )
        return (k_mean, k_deviation), (v_mean, v_deviation)

    @cached_property
    def _by_run(self) -> Tensor:
        return torch.stack([self.k_mean, self.k_deviation, self.v_mean, self.v_deviation], dim=2)

    def by_run(self) -> Tensor:
        """[num_layers, num_kv_heads, 4, head_dim]: means and deviations of keys, then of values, for kernels.

        The same tensor each time.
        """
        return self._by_run

    def assign(self, other: RowStatistics) -> None:
        """Take over other numbers of the same shape, in place: who reads these reads those from now on."""
        for field in fields(self):
            getattr(self, field.name).copy_(getattr(other, field.name))
        parts = (self.k_mean, self.k_deviation, self.v_mean, self.v_deviation)
        self._by_run.copy_(torch.stack(parts, dim=2))

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
            if field.name.endswith("deviation") and float(found.min()) <= 0:
                raise ValueError(f"{field.name}: expected numbers > 0, got {float(found.min())}")


def rows_per_slot(bits: int, itemsize: int) -> int:
    """Rows of a head slot; ``itemsize`` is of the pool's dtype, in bytes."""
    return 1 if bits == WIDTHS[0] else PARTS[bits] * itemsize // 2


def row_bytes(bits: int, head_dim: int, itemsize: int) -> int:
    """Bytes of an encoded row, codes and then scales and minima."""
    return {16: head_dim * itemsize, 8: head_dim, 4: head_dim // 2 + 4 * head_dim // GROUP}[bits]


def normalised(x: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    """Numbers as they are encoded, float32; ``mean`` and ``deviation`` broadcast to ``x`` [n, head_dim]."""
    return (x.float() - mean) / deviation


def encode_rows(x: Tensor, mean: Tensor, deviation: Tensor, bits: int) -> Tensor:
    """Encode rows ``x`` ([n, head_dim], any floating dtype) in 8 or 4 bits: [n, :func:`row_bytes`], uint8.

    Finite numbers give finite ones back; those that are too large for the format saturate.
    """
    return encode_normalised(normalised(x, mean, deviation), bits)


def decode_rows(encoded: Tensor, mean: Tensor, deviation: Tensor, bits: int) -> Tensor:
    """Numbers of encoded rows, [n, head_dim], float32."""
    return mean + deviation * decode_normalised(encoded, bits)


def encode_normalised(x: Tensor, bits: int) -> Tensor:
    """:func:`encode_rows` for numbers [n, head_dim], float32, that are normalised already."""
    if bits == 8:
        return x.clamp(-MAX_8, MAX_8).to(torch.float8_e4m3fn).view(torch.uint8)
    groups = x.clamp(-MAX_4, MAX_4).view(x.shape[0], x.shape[1] // GROUP, GROUP)
    low, high = groups.aminmax(dim=2)
    header = torch.stack([(high - low) / MAX_CODE, low], dim=2).half()  # [n, groups, 2]
    scale, minimum = header.float().unbind(2)
    steps = (groups - minimum[..., None]) / torch.where(scale > 0, scale, torch.inf)[..., None]
    codes = (steps + 0.5).floor().clamp(0, MAX_CODE).to(torch.uint8)
    halves = codes[..., : GROUP // 2] | codes[..., GROUP // 2 :] << 4
    return torch.cat([halves.flatten(1), header.flatten(1).view(torch.uint8)], dim=1)


def decode_normalised(encoded: Tensor, bits: int) -> Tensor:
    """Normalised numbers of encoded rows, [n, head_dim], float32."""
    if bits == 8:
        return encoded.view(torch.float8_e4m3fn).float()
    num_bytes = encoded.shape[1] * 4 // 5  # of codes: a group has 16, and 4 of scale and minimum
    num_groups = num_bytes * 2 // GROUP
    halves = encoded[:, :num_bytes].reshape(encoded.shape[0], num_groups, GROUP // 2)
    header = encoded[:, num_bytes:].contiguous().view(torch.float16).view(encoded.shape[0], num_groups, 2)
    scale, minimum = header.float().unbind(2)
    codes = torch.cat([halves & MAX_CODE, halves >> 4], dim=2)
    return (codes * scale[..., None] + minimum[..., None]).flatten(1)


def read_rows(arena: Tensor, rows: Tensor, bits: int) -> Tensor:
    """Bytes of rows: [n, :func:`row_bytes`], uint8.

    Args:
        arena: [num_layers, num_token_slots, num_kv_heads, head_dim], contiguous, of 2 or 4 bytes a number.
        rows: [n], int, row numbers of this width.
        bits: 16, 8 or 4.
    """
    rows = rows.long()
    if bits == WIDTHS[0]:
        return _bytes(arena, arena.shape[-1] * arena.element_size()).index_select(0, rows)
    blocks = _bytes(arena, 2 * arena.shape[-1])
    return blocks[(rows // PARTS[bits])[:, None], _columns(rows, arena.shape[-1], bits)]


def write_rows(arena: Tensor, rows: Tensor, bits: int, encoded: Tensor) -> None:
    """Write bytes of rows, all different; arguments as for :func:`read_rows`."""
    rows = rows.long()
    if bits == WIDTHS[0]:
        _bytes(arena, arena.shape[-1] * arena.element_size()).index_copy_(0, rows, encoded)
        return
    blocks = _bytes(arena, 2 * arena.shape[-1])
    blocks[(rows // PARTS[bits])[:, None], _columns(rows, arena.shape[-1], bits)] = encoded


def load_rows(
    arena: Tensor, rows: Tensor, bits: int, statistics: MeanAndDeviation | None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Numbers of rows, [n, head_dim], in ``dtype``; mean and deviation (not read with 16 bits) broadcast to it."""
    if bits == WIDTHS[0]:
        return arena.view(-1, arena.shape[-1]).index_select(0, rows).to(dtype)
    if statistics is None:
        raise ValueError(f"statistics: rows of {bits} bits need some, got None")
    return decode_rows(read_rows(arena, rows, bits), *statistics, bits).to(dtype)


def _bytes(arena: Tensor, width: int) -> Tensor:
    return arena.view(-1).view(torch.uint8).view(-1, width)


def _columns(rows: Tensor, head_dim: int, bits: int) -> Tensor:
    """[n, :func:`row_bytes`], int64: place in its block of every byte of a row."""
    part = (rows % PARTS[bits])[:, None]
    if bits == 8:
        return part * head_dim + torch.arange(head_dim, device=rows.device)
    codes = part * (head_dim // 2) + torch.arange(head_dim // 2, device=rows.device)
    header_bytes = 4 * head_dim // GROUP
    header = part * header_bytes + torch.arange(header_bytes, device=rows.device)
    return torch.cat([codes, 3 * head_dim // 2 + header], dim=1)


def check_statistics(arena: Tensor, statistics: RowStatistics | None) -> None:
    """Require statistics that fit an arena: float16, bfloat16 or float32, and a head_dim that is a multiple of 32.

    Raises:
        ValueError: they do not.
    """
    if statistics is None:
        return
    num_layers, _, num_kv_heads, head_dim = arena.shape
    if arena.dtype not in KV_DTYPES or head_dim % GROUP:
        raise ValueError(
            f"statistics: rows of 8 and 4 bits need a pool of 16 or 32 bits and a head_dim that is a multiple of "
            f"{GROUP}, got {str(arena.dtype).removeprefix('torch.')} and {head_dim}"
        )
    check_tensor("statistics", statistics.k_mean, (num_layers, num_kv_heads, head_dim), torch.float32, arena.device)
