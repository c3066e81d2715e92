"""Ways to store a row of a key or a value in few bits, as what a reader gets back: stored and read again at once."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

GROUP = 32
"""Channels that share a scale and a minimum."""
_HEADER_BITS = 32
"""A scale and a minimum, float16 each."""
_TINY = 1e-8

Code = Literal["none", "scaled", "float8", "steps"]


@dataclass(frozen=True)
class RowFormat:
    """How a row of ``head_dim`` numbers is stored.

    Attributes:
        code: "none": as it is; "scaled": ``bits`` for a number, and a float16 scale and minimum for each ``group``;
            "float8": e4m3fn, no header; "steps": int8 of ``parts`` steps to a deviation, no header.
        bits: of a number.
        group: channels with a scale of their own; 0: the whole row.
        mean: the model's mean of each channel is taken off first.
        deviation: numbers are divided by the model's deviation of each channel first.
        rotated: rows are turned by a Hadamard matrix afterwards, so that all channels are alike.
        parts: steps to a deviation.
    """

    code: Code
    bits: int = 16
    group: int = 0
    mean: bool = False
    deviation: bool = False
    rotated: bool = False
    parts: int = 0

    def bits_per_number(self, head_dim: int) -> float:
        """Bits of a number, its share of the headers included."""
        if self.code != "scaled":
            return float(self.bits)
        return self.bits + _HEADER_BITS / (self.group or head_dim)

    def read_back(self, rows: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
        """Rows [num_heads, num_tokens, head_dim], float32, as they are read after they were stored.

        ``mean`` and ``deviation``: [num_heads, head_dim], float32, of the layer.
        """
        if self.code == "none":
            return rows
        shift = mean[:, None] if self.mean else torch.zeros(())
        scale = deviation[:, None] if self.deviation else torch.ones(())
        numbers = (rows - shift) / scale
        if self.rotated:
            turn = hadamard(rows.shape[-1])
            numbers = self._coded(numbers @ turn) @ turn.T
        else:
            numbers = self._coded(numbers)
        return shift + scale * numbers

    def _coded(self, numbers: Tensor) -> Tensor:
        if self.code == "float8":
            most = torch.finfo(torch.float8_e4m3fn).max
            return numbers.clamp(-most, most).to(torch.float8_e4m3fn).float()
        if self.code == "steps":
            return (numbers * self.parts).round().clamp(-128, 127) / self.parts
        groups = numbers.unflatten(-1, (-1, self.group or numbers.shape[-1]))
        least, largest = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        most = 2**self.bits - 1
        step = ((largest - least) / most).half().float().clamp_min(_TINY)
        least = least.half().float()
        return (((groups - least) / step + 0.5).floor().clamp(0, most) * step + least).flatten(-2)


@functools.cache
def hadamard(size: int) -> Tensor:
    """[size, size], float32, orthonormal; ``size`` is a power of 2."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
    return matrix / size**0.5


@dataclass(frozen=True)
class EntryFormat:
    """How the key and the value of an entry are stored.

    Attributes:
        name: for tables.
        k: of its key.
        v: of its value.
        has_sinks: also those of the first tokens of a path, which otherwise stay in 16 bits.
    """

    name: str
    k: RowFormat
    v: RowFormat
    has_sinks: bool = False

    def bits_per_number(self, head_dim: int) -> float:
        """Bits of a number, mean of key and value."""
        return (self.k.bits_per_number(head_dim) + self.v.bits_per_number(head_dim)) / 2


def _both(name: str, rows: RowFormat) -> EntryFormat:
    return EntryFormat(name, rows, rows)


AS_IT_IS = RowFormat("none")
FLOAT8 = RowFormat("float8", 8, mean=True, deviation=True)
EIGHT_SCALED = RowFormat("scaled", 8, mean=True, deviation=True)
FOUR_PLAIN = RowFormat("scaled", 4, GROUP)
FOUR = RowFormat("scaled", 4, GROUP, mean=True, deviation=True)
THREE = RowFormat("scaled", 3, GROUP, mean=True, deviation=True)


def _steps(parts: int) -> RowFormat:
    return RowFormat("steps", 8, mean=True, deviation=True, parts=parts)


FORMATS = (
    _both("8, a scale for a row", RowFormat("scaled", 8)),
    _both("8, a scale for a row, of the model", EIGHT_SCALED),
    _both("8, e4m3 of the model", FLOAT8),
    *(_both(f"8, deviation / {parts} of the model", _steps(parts)) for parts in (12, 16, 20)),
    _both("4, a scale for a row", RowFormat("scaled", 4)),
    _both("4, a scale for 32", FOUR_PLAIN),
    EntryFormat("4, a scale for 32, K of the model", FOUR, FOUR_PLAIN),
    _both("4, a scale for 32, of the model", FOUR),
    _both("4, a scale for 32, mean of the model alone", RowFormat("scaled", 4, GROUP, mean=True)),
    _both("4, a scale for a row, of the model", RowFormat("scaled", 4, mean=True, deviation=True)),
    _both(
        "4, a scale for a row, of the model, rotated", RowFormat("scaled", 4, mean=True, deviation=True, rotated=True)
    ),
    EntryFormat("K 8 e4m3, V 4 for 32, of the model", FLOAT8, FOUR),
    EntryFormat("K 16, V 4 for 32, of the model", AS_IT_IS, FOUR),
    EntryFormat("K 4, V 3 for 32, of the model", FOUR, THREE),
    EntryFormat("K 3, V 4 for 32, of the model", THREE, FOUR),
    _both("3, a scale for 32, of the model", THREE),
    EntryFormat("8, e4m3 of the model; the first tokens, too", FLOAT8, FLOAT8, has_sinks=True),
    EntryFormat("4, a scale for 32, of the model; the first tokens, too", FOUR, FOUR, has_sinks=True),
)
"""What is compared; "of the model": its mean and deviation of each channel, learned from other texts."""
