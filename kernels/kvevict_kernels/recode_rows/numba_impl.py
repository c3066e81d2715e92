"""recode_rows on a CPU, compiled: one loop over rows that encodes, one that writes.

Arguments are addresses and numbers, all int64. The arithmetic is that of ``row_codec.py``, bit for bit.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit
from numba.core import types

from kvevict_kernels import row_codec
from kvevict_kernels.numba_cache import compiled, stamp_of
from kvevict_kernels.row_codec import GROUP, MAX_4, MAX_8, MAX_CODE
from kvevict_kernels.span_attention import numba_rows, numba_vectors
from kvevict_kernels.span_attention.numba_rows import (
    floats,
    int8s,
    int32s,
    item_bytes,
    load_narrow_row,
    load_row,
    narrow_row_at,
    uint8s,
)
from kvevict_kernels.span_attention.numba_vectors import half_bits, half_number

_HALF = GROUP // 2
_ZERO, _ONE, _ROUND, _INFINITY = np.float32(0.0), np.float32(1.0), np.float32(0.5), np.float32(np.inf)
_MAX_8, _MAX_4, _CODES = np.float32(MAX_8), np.float32(MAX_4), np.float32(MAX_CODE)
_TOP = np.float32(MAX_CODE + 0.5)
_STEP_OF_EIGHTHS = np.float32(256.0)  # rows of 8 bits are read divided by it
_SMALL, _TO_SMALL = np.float32(2.0**-6), np.float32(2.0**14)
"""Below the first, float8 e4m3fn has steps of 2**-9, as float32 has them from the second on."""
_SOURCES = [__file__, numba_rows.__file__, numba_vectors.__file__, row_codec.__file__]


@njit
def _copy_words(source, target, num_bytes):
    from_words, to_words = int32s(source), int32s(target)
    for i in range(num_bytes // 4):
        to_words[i] = from_words[i]


@njit
def _clamp(numbers, count, limit):
    for j in range(count):
        x = numbers[j]
        x = limit if x > limit else x
        numbers[j] = -limit if x < -limit else x


@njit
def _encode_eighths(numbers, sizes, head_dim, target):
    """``sizes`` [2 * head_dim] is scratch memory."""
    out, bits = uint8s(target), numbers.view(np.int32)
    _clamp(numbers, head_dim, _MAX_8)
    size_bits = sizes.view(np.int32)
    for j in range(head_dim):
        sizes[j] = abs(numbers[j])
        sizes[head_dim + j] = sizes[j] + _TO_SMALL
    for j in range(head_dim):
        size, sign = size_bits[j], (bits[j] >> 24) & 0x80
        code = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
        code = size_bits[head_dim + j] & 15 if sizes[j] < _SMALL else code
        out[j] = sign | code


@njit
def _encode_quarters(numbers, sizes, head_dim, target):
    """``sizes`` [2 * head_dim] is scratch memory."""
    out, header = uint8s(target), int32s(target + head_dim // 2)
    _clamp(numbers, head_dim, _MAX_4)
    codes = sizes.view(np.int32)
    for group in range(head_dim // GROUP):
        x = numbers[group * GROUP : (group + 1) * GROUP]
        for j in range(_HALF):
            sizes[j] = min(x[j], x[j + _HALF])
            sizes[j + _HALF] = max(x[j], x[j + _HALF])
        low, high = sizes[0], sizes[_HALF]
        for j in range(1, _HALF):
            low, high = min(low, sizes[j]), max(high, sizes[j + _HALF])
        scale_bits, minimum_bits = half_bits((high - low) / _CODES), half_bits(low)
        step, minimum = half_number(scale_bits), half_number(minimum_bits)
        if step == _ZERO:
            step = _INFINITY
        for j in range(GROUP):
            code = (x[j] - minimum) / step + _ROUND
            code = _TOP if code > _TOP else code
            codes[j] = np.int32(_ZERO if code < _ZERO else code)
        for j in range(_HALF):
            out[group * _HALF + j] = codes[j] | codes[j + _HALF] << 4
        header[group] = scale_bits | minimum_bits << 16


@njit
def _encode_row(arena, kind, head_dim, row, width, mean, deviation, bits, target, numbers, sizes):
    if width == 16:
        load_row(kind, head_dim, arena + row * head_dim * item_bytes(kind), numbers.ctypes.data, _ONE)
        means, deviations = floats(mean), floats(deviation)
        for j in range(head_dim):
            numbers[j] = (numbers[j] - means[j]) / deviations[j]
    else:
        codes, header = narrow_row_at(arena, row, head_dim, width)
        load_narrow_row(width, head_dim, codes, header, numbers.ctypes.data)
        for j in range(head_dim):
            numbers[j] *= _STEP_OF_EIGHTHS
    if bits == 8:
        _encode_eighths(numbers, sizes, head_dim, target)
    else:
        _encode_quarters(numbers, sizes, head_dim, target)


@cache
def calls() -> tuple[Any, Any, int]:
    """The two functions, and the stamp that is their first argument; compiled at the first call, or loaded.

    ``encode(stamp, arena, kind, head_dim, source_rows, source_bits, runs, means, deviations, bits, staging, row_bytes,
    num_rows)`` and ``write(stamp, arena, head_dim, bits, places, staging, row_bytes, num_rows)``.
    """
    stamp = stamp_of(map(Path, _SOURCES))

    def build(is_cached: bool) -> tuple[Any, Any, int]:
        @njit(types.void(*[types.int64] * 13), cache=is_cached, nogil=True)
        def encode(
            given,
            arena,
            kind,
            head_dim,
            source_rows,
            source_bits,
            runs,
            means,
            deviations,
            bits,
            staging,
            row_bytes,
            num_rows,
        ):
            if given != stamp:
                return
            numbers, sizes = np.empty(head_dim, np.float32), np.empty(2 * head_dim, np.float32)
            rows, widths, own_runs = int32s(source_rows), int8s(source_bits), int32s(runs)
            for i in range(num_rows):
                row, width, target = np.int64(rows[i]), np.int64(widths[i]), staging + i * row_bytes
                if width == bits and bits == 4:
                    codes, header = narrow_row_at(arena, row, head_dim, 4)
                    _copy_words(codes, target, head_dim // 2)
                    _copy_words(header, target + head_dim // 2, row_bytes - head_dim // 2)
                elif width == bits:
                    _copy_words(arena + row * row_bytes, target, row_bytes)
                else:
                    run = 4 * head_dim * np.int64(own_runs[i])
                    _encode_row(
                        arena, kind, head_dim, row, width, means + run, deviations + run, bits, target, numbers, sizes
                    )

        @njit(types.void(*[types.int64] * 8), cache=is_cached, nogil=True)
        def write(given, arena, head_dim, bits, places, staging, row_bytes, num_rows):
            if given != stamp:
                return
            rows = int32s(places)
            for i in range(num_rows):
                source = staging + i * row_bytes
                if bits == 4:
                    codes, header = narrow_row_at(arena, np.int64(rows[i]), head_dim, 4)
                    _copy_words(source, codes, head_dim // 2)
                    _copy_words(source + head_dim // 2, header, row_bytes - head_dim // 2)
                else:
                    _copy_words(source, arena + np.int64(rows[i]) * row_bytes, row_bytes)

        return encode, write, stamp

    return compiled("recoding", build)
