"""Reading, adding and writing rows of numbers by their addresses.

Counts are elements, a multiple of ``LANES`` per row. Rows of a cache or of queries have a kind (``numba_vectors.py``);
others are float32.
"""

from __future__ import annotations

import math

import numpy as np
from numba import carray, njit

from kvevict_kernels.row_sizes import GROUP
from kvevict_kernels.span_attention.numba_vectors import (
    BFLOAT16,
    CODE_BYTES,
    FLOAT16,
    FLOAT32,
    LANES,
    TILE_ROWS,
    TILE_VECTORS,
    add_numbers,
    load_numbers,
    load_units,
    multiply_tile,
    numbers_at,
    part_group,
    scale_numbers,
    store_numbers,
    sum_of_products,
    turn_across,
    turn_within,
)

WIDTH = LANES * TILE_VECTORS
"""Columns of a tile of a product."""
_ANY_COUNT = 1 << 40


def _numbers_from(dtype):
    """The function that finds the numbers of this type from an address on."""

    @njit
    def numbers(address):
        return carray(numbers_at(address, dtype), _ANY_COUNT)

    return numbers


int64s, int32s, uint16s, floats = map(_numbers_from, (np.int64, np.int32, np.uint16, np.float32))


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
def load_codes(head_dim, source, target):
    """Write a row of codes as float32, less the code of 0, in the order of :func:`part_row`."""
    for i in range(0, head_dim // 2, CODE_BYTES):
        load_units(source + i, target + 8 * i)


@njit
def part_row(head_dim, row):
    """Order a row as codes are read: of every group even places, then odd ones. The fifth time undoes it."""
    for i in range(0, 4 * head_dim, 4 * GROUP):
        part_group(row + i)


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
def scale_row(head_dim, target, factors, terms, weight):
    """``target = target * factors + terms * weight``."""
    for i in range(0, 4 * head_dim, 4 * LANES):
        scale_numbers(target + i, factors + i, terms + i, weight)


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


@njit
def multiply_columns(num_rows, target, left, left_stride, right, columns, depth):
    """Add up to ``TILE_ROWS`` rows of a product; ``columns`` is the stride of ``target`` and ``right``, too."""
    whole = columns // WIDTH * WIDTH
    for i in range(0, 4 * whole, 4 * WIDTH):
        multiply(num_rows, target + i, columns, left, left_stride, right + i, columns, depth)
    for i in range(4 * whole, 4 * columns, 4 * LANES):
        for r in range(num_rows):
            row_target, row_left = target + 4 * r * columns + i, left + 4 * r * left_stride
            multiply_tile(1, 1, row_target, columns, row_left, left_stride, right + i, columns, depth)


@njit
def turn_rows(num_rows, head_dim, rows, rotation, scratch):
    """Multiply rows by the rotation of ``row_codec.py``; ``scratch`` is of ``TILE_ROWS`` rows."""
    if head_dim & (head_dim - 1) != 0:
        for first in range(0, num_rows, TILE_ROWS):
            tile, tile_rows = rows + 4 * first * head_dim, min(TILE_ROWS, num_rows - first)
            fill(scratch, tile_rows * head_dim, np.float32(0.0))
            multiply_columns(tile_rows, scratch, tile, head_dim, rotation, head_dim, head_dim)
            load_row(FLOAT32, tile_rows * head_dim, scratch, tile, np.float32(1.0))
        return
    factor = np.float32(1.0 / math.sqrt(head_dim))
    for row in range(rows, rows + 4 * num_rows * head_dim, 4 * head_dim):
        step = LANES
        while step < head_dim:
            for first in range(0, head_dim, 2 * step):
                for i in range(first, first + step, LANES):
                    turn_across(row + 4 * i, row + 4 * (i + step))
            step *= 2
        for i in range(0, 4 * head_dim, 4 * LANES):
            turn_within(row + i, factor)
