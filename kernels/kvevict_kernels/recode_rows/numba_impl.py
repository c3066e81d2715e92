"""recode_rows on a CPU, compiled: one loop over rows that encodes, one that writes.

Arguments are addresses and numbers, all int64. The arithmetic is that of ``row_codec.py``, but for the order of sums.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit
from numba.core import types

from kvevict_kernels import row_codec, row_sizes
from kvevict_kernels.numba_cache import compiled, stamp_of
from kvevict_kernels.row_codec import LEAST_STEP, MIDDLE, REACH
from kvevict_kernels.row_sizes import STEP_BYTES, WIDTHS
from kvevict_kernels.span_attention import numba_rows, numba_vectors
from kvevict_kernels.span_attention.numba_rows import (
    fill,
    floats,
    int32s,
    item_bytes,
    load_row,
    turn_rows,
    uint16s,
)
from kvevict_kernels.span_attention.numba_vectors import (
    LANES,
    encode_numbers,
    keep_largest,
    normalise_numbers,
    row_maximum,
    sum_of_numbers,
)

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_NARROW = WIDTHS[1]
_FIRST_STEP, _LEAST_STEP = np.float32(REACH / MIDDLE), np.float32(LEAST_STEP)
_SOURCES = [__file__, numba_rows.__file__, numba_vectors.__file__, row_codec.__file__, row_sizes.__file__]


@njit
def _copy(source, target, num_bytes):
    from_words, to_words = uint16s(source), uint16s(target)
    for i in range(num_bytes // 2):
        to_words[i] = from_words[i]


@njit
def _encode_row(numbers, head_dim, mean, scales, rotation, target, scratch):
    """Encode a row of float32 ``numbers``; ``scratch`` is of ``head_dim`` numbers and two vectors."""
    for i in range(0, 4 * head_dim, 4 * LANES):
        normalise_numbers(numbers + i, mean + i, scales + i)
    turn_rows(1, head_dim, numbers, rotation, scratch)
    sums = scratch + 4 * head_dim
    fill(sums, LANES, _ZERO)
    for i in range(0, 4 * head_dim, 4 * LANES):
        keep_largest(numbers + i, sums)
    first_step = max(row_maximum(LANES, sums) * _FIRST_STEP, _LEAST_STEP)
    fill(sums, 2 * LANES, _ZERO)
    for i in range(0, head_dim, 2 * LANES):
        encode_numbers(numbers + 4 * i, first_step, target + i // 2, sums)
    floats(sums)[0] = sum_of_numbers(sums) / sum_of_numbers(sums + 4 * LANES)
    step = int32s(sums)[0]  # its bits, of which the upper half stays, rounded to nearest, ties to even
    uint16s(target + head_dim // 2)[0] = (step + 0x7FFF + ((step >> 16) & 1)) >> 16


@cache
def calls() -> tuple[Any, Any, int]:
    """The two functions, and the stamp that is their first argument; compiled at the first call, or loaded.

    Arguments are those of :class:`~kvevict_kernels.recode_rows.Encoding`.
    """
    stamp = stamp_of(map(Path, _SOURCES))

    def build(is_cached: bool) -> tuple[Any, Any, int]:
        @njit(types.void(*[types.int64] * 13), cache=is_cached, nogil=True)
        def encode(
            given, arena, kind, head_dim, bits, sources, runs, means, scales, rotation, steps, out, n
        ):  # fmt: skip
            if given != stamp:
                return
            memory = np.empty(2 * head_dim + 2 * LANES, np.float32)
            numbers, scratch = memory.ctypes.data, memory.ctypes.data + 4 * head_dim
            for i in range(n):
                row, target = np.int64(int32s(sources)[i]), out + i * (head_dim // 2 + STEP_BYTES)
                if bits == _NARROW:
                    _copy(arena + row * (head_dim // 2), target, head_dim // 2)
                    uint16s(target + head_dim // 2)[0] = uint16s(steps)[row]
                else:
                    load_row(kind, head_dim, arena + row * head_dim * item_bytes(kind), numbers, _ONE)
                    run = 4 * head_dim * np.int64(int32s(runs)[i])
                    _encode_row(numbers, head_dim, means + run, scales + run, rotation, target, scratch)

        @njit(types.void(*[types.int64] * 7), cache=is_cached, nogil=True)
        def write(given, arena, head_dim, steps, places, staging, num_rows):
            if given != stamp:
                return
            for i in range(num_rows):
                row, source = np.int64(int32s(places)[i]), staging + i * (head_dim // 2 + STEP_BYTES)
                _copy(source, arena + row * (head_dim // 2), head_dim // 2)
                uint16s(steps)[row] = uint16s(source + head_dim // 2)[0]

        return encode, write, stamp

    return compiled("recoding", build)
