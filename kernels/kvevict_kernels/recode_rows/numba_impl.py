"""recode_rows on a CPU, compiled: a loop over rows that encodes, of which each thread takes a part.

The arithmetic is that of ``row_codec.py``, but for the order of sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numba import carray, cfunc, njit
from numba.core import types

from kvevict_kernels import row_codec, row_sizes
from kvevict_kernels.row_codec import LEAST_STEP, MIDDLE, REACH
from kvevict_kernels.row_sizes import STEP_BYTES
from kvevict_kernels.span_attention.numba_impl import share_of
from kvevict_kernels.span_attention.numba_rows import fill, floats, int32s, item_bytes, load_row, turn_rows, uint16s
from kvevict_kernels.span_attention.numba_vectors import (
    LANES,
    encode_numbers,
    keep_largest,
    normalise_numbers,
    prefetch,
    row_maximum,
    sum_of_numbers,
)
from kvevict_kernels.span_attention.openmp import Call, compiled

STAMP, KIND, HEAD_DIM, NUM_ROWS, ARENA, ROWS, RUNS, MEANS, SCALES, ROTATION, OUT, SCRATCH, NUM_WORDS = range(13)
"""Indices into the list of 64-bit words that the compiled function gets: four numbers, then addresses of what an
:class:`~kvevict_kernels.recode_rows.Encoding` has, and of the threads' scratch memory."""
AHEAD = 8
"""Entries between the one that is encoded and the one that is fetched."""
LINE = 64
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_FIRST_STEP, _LEAST_STEP = np.float32(REACH / MIDDLE), np.float32(LEAST_STEP)


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


@njit
def _encode_share(words, begin, end, scratch):
    """Encode the entries ``[begin, end)``; ``scratch`` is of two rows of numbers and two vectors."""
    kind, head_dim, rows, runs = words[KIND], words[HEAD_DIM], int32s(words[ROWS]), int32s(words[RUNS])
    num_bytes, rest = head_dim * item_bytes(kind), scratch + 4 * head_dim
    for i in range(begin, end):
        # Entries of a run lie a token slot apart, which the processor does not foresee.
        ahead = words[ARENA] + np.int64(rows[min(i + AHEAD, end - 1)]) * num_bytes
        for line in range(0, num_bytes, LINE):
            prefetch(ahead + line)
        load_row(kind, head_dim, words[ARENA] + np.int64(rows[i]) * num_bytes, scratch, _ONE)
        run, target = 4 * head_dim * np.int64(runs[i]), words[OUT] + i * (head_dim // 2 + STEP_BYTES)
        _encode_row(scratch, head_dim, words[MEANS] + run, words[SCALES] + run, words[ROTATION], target, rest)


def _compile(stamp: int, is_cached: bool) -> Any:
    @cfunc(types.void(types.CPointer(types.int64)), cache=is_cached)
    def encode(address):
        words = carray(address, NUM_WORDS)
        # Never so: as in `span_attention`, the comparison makes the stamp a part of the code.
        if words[STAMP] != stamp:
            return
        thread, begin, end = share_of(words[NUM_ROWS])
        _encode_share(words, begin, end, words[SCRATCH] + 4 * thread * (2 * words[HEAD_DIM] + 2 * LANES))

    return encode


@cache
def call() -> Call:
    """The compiled function; compiled at the first call, or loaded."""
    return compiled("recoding", [__file__, row_codec.__file__, row_sizes.__file__], _compile)


def encode(kind: int, head_dim: int, num_rows: int, addresses: Sequence[int], num_threads: int) -> None:
    """Encode rows on so many threads; ``addresses``: those of the words from :data:`ARENA` to :data:`OUT`."""
    scratch = np.empty(num_threads * (2 * head_dim + 2 * LANES), np.float32)
    words = np.array([call().stamp, kind, head_dim, num_rows, *addresses, scratch.ctypes.data], np.int64)
    call().run(words, num_threads)
