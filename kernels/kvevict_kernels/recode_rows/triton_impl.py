"""recode_rows on the device: for K, then V, launches that encode into a temporary, then launches that write.

They are ordered by the stream, so nothing depends on the order of programs, however sources and targets overlap. The
arithmetic is that of ``row_codec.py``, but for the order of sums.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvevict_kernels import row_codec
from kvevict_kernels.recode_rows import NARROW, Encoding
from kvevict_kernels.triton_rows import row_at, turn

ROW_BLOCK = 16
"""Rows of a program; it holds all of their numbers."""
INDICES = ("source_rows_ptr", "runs_ptr", "places_ptr")
"""Not specialised on alignment, which varies by call and would cause recompilation."""
_MIDDLE = tl.constexpr(row_codec.MIDDLE)
_MAX_CODE = tl.constexpr(row_codec.MAX_CODE)
_REACH = tl.constexpr(row_codec.REACH / row_codec.MIDDLE)
_LEAST_STEP = tl.constexpr(row_codec.LEAST_STEP)
_MAX_NUMBER = tl.constexpr(row_codec.MAX_NUMBER)


@triton.jit
def _encode(x, m_d, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Words of four codes, [BLOCK, BLOCK_D / 4], and steps, [BLOCK], int16, of turned rows, 0 behind ``m_d``."""
    first_step = tl.maximum(tl.max(tl.abs(x), 1) * _REACH, _LEAST_STEP)
    steps = tl.div_rn(x, tl.broadcast_to(first_step[:, None], x.shape))
    codes = tl.minimum(tl.maximum(tl.floor(steps + (_MIDDLE + 0.5)), 0.0), _MAX_CODE)
    units = tl.where(m_d, codes - _MIDDLE, 0.0)
    step = tl.div_rn(tl.sum(x * units, 1), tl.sum(units * units, 1))
    shifts = tl.reshape(tl.arange(0, BLOCK_D) % 4 * 4, (1, BLOCK_D // 4, 4))
    words = tl.sum(tl.reshape(codes.to(tl.int32), (BLOCK, BLOCK_D // 4, 4)) << shifts, 2)
    # A bfloat16 is the upper half of a float32, rounded to nearest, ties to even.
    bits = step.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return words.to(tl.int16), bits.to(tl.int16)


@triton.jit(do_not_specialize=["num_rows", "statistic"], do_not_specialize_on_alignment=list(INDICES))
def _encode_kernel(
    rows_ptr,  # an arena, [X, D]
    staging_ptr,  # [num_rows, row_bytes] uint8
    source_rows_ptr,  # [num_rows] int32
    runs_ptr,  # [num_rows] int32
    statistics_ptr,  # [D + 4 * num_runs, D] float32
    num_rows,
    statistic,  # place of the means among the four
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Encode rows of 16 bits."""
    i_row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_row = i_row < num_rows
    source = tl.load(source_rows_ptr + i_row, mask=m_row, other=0)
    o_d = tl.arange(0, BLOCK_D)
    m_d = (o_d < D)[None, :]
    mask = m_row[:, None] & m_d
    x = tl.load(rows_ptr + source.to(tl.int64)[:, None] * D + o_d[None, :], mask=mask, other=0.0).to(tl.float32)
    run = tl.load(runs_ptr + i_row, mask=m_row, other=0).to(tl.int64)
    p_mean = statistics_ptr + (run * 4 + statistic + D)[:, None] * D + o_d[None, :]
    mean = tl.load(p_mean, mask=mask, other=0.0)
    x = tl.div_rn(x - mean, tl.load(p_mean + D, mask=mask, other=1.0))
    x = tl.where(x == x, tl.minimum(tl.maximum(x, -_MAX_NUMBER), _MAX_NUMBER), 0.0)
    words, step = _encode(turn(x, statistics_ptr, BLOCK, D, BLOCK_D), m_d, BLOCK=BLOCK, BLOCK_D=BLOCK_D)
    o_w = tl.arange(0, BLOCK_D // 4)
    p_out = staging_ptr.to(tl.pointer_type(tl.int16), bitcast=True) + i_row * (D // 4 + 1)
    tl.store(p_out[:, None] + o_w[None, :], words, mask=m_row[:, None] & (o_w < D // 4)[None, :])
    tl.store(p_out + D // 4, step, mask=m_row)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=list(INDICES))
def _move_kernel(
    rows_ptr,  # an arena, [X, D]
    steps_ptr,  # [X] bfloat16, of its rows of 4 bits
    staging_ptr,  # [num_rows, row_bytes] uint8
    places_ptr,  # [num_rows] int32
    num_rows,
    D: tl.constexpr,
    BLOCK_W: tl.constexpr,  # at least D / 4
    BLOCK: tl.constexpr,
    READS: tl.constexpr,
):
    """Write encoded rows to their places (``READS``: read them from there), two bytes at once.

    Outside of an arena rows are no multiple of 4 bytes long.
    """
    i_row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_row = i_row < num_rows
    number = tl.load(places_ptr + i_row, mask=m_row, other=0)
    o_w = tl.arange(0, BLOCK_W)
    m_w = m_row[:, None] & (o_w < D // 4)[None, :]
    p_staged = staging_ptr.to(tl.pointer_type(tl.int16), bitcast=True) + i_row * (D // 4 + 1)
    p_step = steps_ptr.to(tl.pointer_type(tl.int16), bitcast=True) + number
    p_row = row_at(rows_ptr.to(tl.pointer_type(tl.uint8), bitcast=True), number, D=D)
    p_row = p_row.to(tl.pointer_type(tl.int16), bitcast=True)
    if READS:
        tl.store(p_staged[:, None] + o_w[None, :], tl.load(p_row[:, None] + o_w[None, :], mask=m_w), mask=m_w)
        tl.store(p_staged + D // 4, tl.load(p_step, mask=m_row), mask=m_row)
    else:
        tl.store(p_row[:, None] + o_w[None, :], tl.load(p_staged[:, None] + o_w[None, :], mask=m_w), mask=m_w)
        tl.store(p_step, tl.load(p_staged + D // 4, mask=m_row), mask=m_row)


def encode_triton(encoding: Encoding) -> None:
    """Device path of :func:`kvevict_kernels.recode_rows.encode_cpu`: one launch."""
    arena, rows, coding = encoding.arena, encoding.rows, encoding.coding
    if encoding.bits == NARROW:
        _move(arena, rows, encoding.out, coding.steps(encoding.is_v), reads=True)
        return
    num_rows, head_dim = rows.numel(), arena.shape[3]
    if num_rows:
        _encode_kernel[(triton.cdiv(num_rows, ROW_BLOCK),)](
            *(arena, encoding.out, rows, encoding.runs, coding.statistics.table, num_rows, 2 * encoding.is_v),
            D=head_dim,
            BLOCK_D=triton.next_power_of_2(head_dim),
            BLOCK=ROW_BLOCK,
        )


def write_rows_triton(arena: Tensor, places: Tensor, encoded: Tensor, steps: Tensor) -> None:
    """Device path of :func:`kvevict_kernels.row_codec.write_rows`: one launch."""
    _move(arena, places, encoded, steps, reads=False)


def _move(arena: Tensor, places: Tensor, encoded: Tensor, steps: Tensor, *, reads: bool) -> None:
    num_rows, head_dim = places.numel(), arena.shape[3]
    if num_rows:
        _move_kernel[(triton.cdiv(num_rows, ROW_BLOCK),)](
            *(arena, steps, encoded, places, num_rows),
            D=head_dim,
            BLOCK_W=triton.next_power_of_2(head_dim // 4),
            BLOCK=ROW_BLOCK,
            READS=reads,
        )
