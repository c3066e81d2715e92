"""recode_rows on a CPU, compiled: one loop over rows that encodes, one that writes; each thread takes a part.

Both get a list of 64-bit words, of which the constants below are indices. The arithmetic is that of ``row_codec.py``,
but for the order of sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numba import carray, cfunc, njit
from numba.core import types

from kvevict_kernels import row_codec, row_sizes
from kvevict_kernels.numba_cache import compiled, stamp_of
from kvevict_kernels.row_codec import LEAST_STEP, MIDDLE, REACH
from kvevict_kernels.row_sizes import STEP_BYTES, WIDTHS
from kvevict_kernels.span_attention import numba_rows, numba_vectors
from kvevict_kernels.span_attention.numba_impl import link, thread_count, thread_number
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
    prefetch,
    row_maximum,
    sum_of_numbers,
)
from kvevict_kernels.span_attention.openmp import Team, torch_team

(
    STAMP,  # number: of the compiled code
    ARENA,  # address of the arena
    KIND,  # number: kind of its rows of 16 bits
    HEAD_DIM,  # number
    BITS,  # number: of the rows that are read
    ROWS,  # address [num_rows], int32: row numbers to read, or to write
    RUNS,  # address [num_rows], int32
    MEANS,  # address [num_runs, head_dim], float32
    SCALES,  # likewise
    ROTATION,  # address [head_dim, head_dim], float32
    STEPS,  # address [rows of 4 bits], bfloat16
    ENCODED,  # address [num_rows, row_bytes]: where rows are encoded, or where they are
    NUM_ROWS,  # number
    SCRATCH,  # address of the threads' scratch memory
    SCRATCH_STRIDE,  # bytes per thread
    NUM_WORDS,
) = range(16)

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_NARROW = WIDTHS[1]
_FIRST_STEP, _LEAST_STEP = np.float32(REACH / MIDDLE), np.float32(LEAST_STEP)
_LINE = 64
_AHEAD = 8
"""Entries between the one that is encoded and the one that is fetched."""
_SOURCES = [__file__, numba_rows.__file__, numba_vectors.__file__, row_codec.__file__, row_sizes.__file__]


class Calls(NamedTuple):
    """The two compiled functions, the threads that run them, and the stamp that they expect."""

    team: Team
    stamp: int
    encode: Any
    write: Any


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


@njit
def _encode_share(words, begin, end, scratch):
    """Encode the entries ``[begin, end)``; ``scratch`` is of two rows of numbers and two vectors."""
    arena, kind, head_dim, runs = words[ARENA], words[KIND], words[HEAD_DIM], words[RUNS]
    rows, is_narrow = int32s(words[ROWS]), words[BITS] == _NARROW
    num_bytes = head_dim // 2 if is_narrow else head_dim * item_bytes(kind)
    for i in range(begin, end):
        # Entries of a run lie a token slot apart, which the processor does not foresee.
        ahead = arena + np.int64(rows[min(i + _AHEAD, end - 1)]) * num_bytes
        for line in range(0, num_bytes, _LINE):
            prefetch(ahead + line)
        row, target = np.int64(rows[i]), words[ENCODED] + i * (head_dim // 2 + STEP_BYTES)
        if is_narrow:
            _copy(arena + row * num_bytes, target, num_bytes)
            uint16s(target + num_bytes)[0] = uint16s(words[STEPS])[row]
        else:
            load_row(kind, head_dim, arena + row * num_bytes, scratch, _ONE)
            run = 4 * head_dim * np.int64(int32s(runs)[i])
            means, scales, rest = words[MEANS] + run, words[SCALES] + run, scratch + 4 * head_dim
            _encode_row(scratch, head_dim, means, scales, words[ROTATION], target, rest)


@njit
def _write_share(words, begin, end):
    """Write the entries ``[begin, end)``."""
    num_bytes = words[HEAD_DIM] // 2
    for i in range(begin, end):
        row, source = np.int64(int32s(words[ROWS])[i]), words[ENCODED] + i * (num_bytes + STEP_BYTES)
        _copy(source, words[ARENA] + row * num_bytes, num_bytes)
        uint16s(words[STEPS])[row] = uint16s(source + num_bytes)[0]


@njit
def _share(num_rows):
    """The calling thread's number, and the entries that it has to do."""
    thread, num_threads = np.int64(thread_number()), np.int64(thread_count())
    return thread, num_rows * thread // num_threads, num_rows * (thread + 1) // num_threads


@cache
def calls() -> Calls:
    """The two functions, compiled at the first call, or loaded."""
    stamp, team = stamp_of(map(Path, _SOURCES)), torch_team()
    assert team is not None, "reason_not_to_run was not asked"
    link(team)

    def build(is_cached: bool) -> Calls:
        @cfunc(types.void(types.CPointer(types.int64)), cache=is_cached)
        def encode(address):
            words = carray(address, NUM_WORDS)
            # Never so: as in `span_attention`, the comparison makes the stamp a part of the code.
            if words[STAMP] != stamp:
                return
            thread, begin, end = _share(words[NUM_ROWS])
            _encode_share(words, begin, end, words[SCRATCH] + thread * words[SCRATCH_STRIDE])

        @cfunc(types.void(types.CPointer(types.int64)), cache=is_cached)
        def write(address):
            words = carray(address, NUM_WORDS)
            if words[STAMP] != stamp:
                return
            _, begin, end = _share(words[NUM_ROWS])
            _write_share(words, begin, end)

        return Calls(team, stamp, encode, write)

    return compiled("recoding", build)


def run(call: Any, head_dim: int, given: Mapping[int, int], num_threads: int) -> None:
    """Run one of :func:`calls` with these words on so many threads."""
    stride = 4 * (2 * head_dim + 2 * LANES)
    scratch, words = np.empty(num_threads * stride, np.uint8), np.zeros(NUM_WORDS, np.int64)
    own = {STAMP: calls().stamp, HEAD_DIM: head_dim, SCRATCH: scratch.ctypes.data, SCRATCH_STRIDE: stride}
    for index, word in (own | dict(given)).items():
        words[index] = word
    calls().team.run(call.address, words.ctypes.data, num_threads)
