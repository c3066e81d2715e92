"""Reading, adding and writing rows of numbers by their addresses.

Counts are elements, a multiple of ``LANES`` per row. Rows of a cache or of queries have a kind (``numba_vectors.py``);
others are float32.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from kvevict_kernels.row_codec import GROUP, PARTS
from kvevict_kernels.span_attention.numba_vectors import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    LANES,
    TILE_VECTORS,
    add_numbers,
    load_eighths,
    load_numbers,
    load_quarters,
    multiply_tile,
    numbers_at,
    scale_numbers,
    store_numbers,
    sum_of_products,
)

WIDTH = LANES * TILE_VECTORS
"""Columns of a tile of a product."""
_ANY_COUNT = 1 << 40
_QUARTERS = PARTS[4]


@njit
def int64s(address):
    """The int64 numbers from an address on."""
    return carray(numbers_at(address, np.int64), _ANY_COUNT)


@njit
def int8s(address):
    """The int8 numbers from an address on."""
    return carray(numbers_at(address, np.int8), _ANY_COUNT)


@njit
def uint8s(address):
    """The bytes from an address on."""
    return carray(numbers_at(address, np.uint8), _ANY_COUNT)


@njit
def int32s(address):
    """The int32 numbers from an address on."""
    return carray(numbers_at(address, np.int32), _ANY_COUNT)


@njit
def floats(address):
    """The float32 numbers from an address on."""
    return carray(numbers_at(address, np.float32), _ANY_COUNT)


@njit
def item_bytes(kind):
    """Bytes of one number."""
    return 4 if kind == FLOAT32 else 2


@njit
def fill(target, count, value):
    """Write one number ``count`` times."""
    numbers = floats(target)
    for i in range(count):
        numbers[i] = value


@njit
def load_row(kind, head_dim, source, target, factor):
    """Write a row as float32, times a factor."""
    for i in range(0, head_dim, LANES):
        if kind == BFLOAT16:
            load_numbers(BFLOAT16, source + 2 * i, target + 4 * i, factor)
        elif kind == FLOAT16:
            load_numbers(FLOAT16, source + 2 * i, target + 4 * i, factor)
        else:
            load_numbers(FLOAT32, source + 4 * i, target + 4 * i, factor)


@njit
def narrow_row_at(arena, row, head_dim, bits):
    """Addresses of a row of 8 or 4 bits of an arena: of its codes, and of its scales and minima (4 bits)."""
    if bits == 8:
        codes = arena + row * head_dim
        return codes, codes
    part = row % _QUARTERS
    block = arena + row // _QUARTERS * (2 * head_dim)
    codes = block + part * (head_dim // 2)
    return codes, block + _QUARTERS * head_dim // 2 + part * (4 * (head_dim // GROUP))


@njit
def load_narrow_row(bits, head_dim, source, header, target):
    """Write a row of 8 or 4 bits as float32, before the deviation and the mean; of 8 bits divided by 256."""
    if bits == 8:
        for i in range(0, head_dim, LANES):
            load_eighths(source + i, target + 4 * i)
    else:
        for i in range(0, head_dim, GROUP):
            load_quarters(source + i // 2, header + 4 * (i // GROUP), target + 4 * i)


@njit
def store_row(kind, head_dim, source, target, factor):
    """Round a float32 row, times a factor, to a kind."""
    for i in range(0, head_dim, LANES):
        if kind == BFLOAT16:
            store_numbers(BFLOAT16, source + 4 * i, target + 2 * i, factor)
        elif kind == FLOAT16:
            store_numbers(FLOAT16, source + 4 * i, target + 2 * i, factor)
        else:
            store_numbers(FLOAT32, source + 4 * i, target + 4 * i, factor)


@njit
def add_row(head_dim, source, target, factor, keep):
    """``target = keep * target + factor * source``."""
    for i in range(0, 4 * head_dim, 4 * LANES):
        add_numbers(source + i, target + i, factor, keep)


@njit
def scale_row(head_dim, target, factors, factor, terms, weight):
    """``target = target * factors * factor + terms * weight``."""
    for i in range(0, 4 * head_dim, 4 * LANES):
        scale_numbers(target + i, factors + i, factor, terms + i, weight)


@njit
def product_of(head_dim, left, right):
    """Sum of the products of two rows."""
    total = np.float32(0.0)
    for i in range(0, 4 * head_dim, 4 * LANES):
        total += sum_of_products(left + i, right + i)
    return total


@njit
def multiply(num_rows, target, target_stride, left, left_stride, right, right_stride, depth):
    """Add up to ``TILE_ROWS`` rows of a product, ``WIDTH`` columns."""
    if num_rows == 4:
        multiply_tile(4, TILE_VECTORS, target, target_stride, left, left_stride, right, right_stride, depth)
    elif num_rows == 3:
        multiply_tile(3, TILE_VECTORS, target, target_stride, left, left_stride, right, right_stride, depth)
    elif num_rows == 2:
        multiply_tile(2, TILE_VECTORS, target, target_stride, left, left_stride, right, right_stride, depth)
    else:
        multiply_tile(1, TILE_VECTORS, target, target_stride, left, left_stride, right, right_stride, depth)
