"""recode_rows on the device: for K, then V, launches that encode into a temporary, then launches that write.

They are ordered by the stream, so nothing depends on the order of programs, however sources and targets overlap. The
arithmetic is that of ``row_codec.py``, but for the order of sums.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvevict_kernels import row_codec
from kvevict_kernels.recode_rows import Encoding, steps_of
from kvevict_kernels.row_codec import WIDTHS, row_bytes
from kvevict_kernels.triton_rows import row_at, turn

ROW_BLOCK = 16
"""Rows of a program; it holds all of their numbers."""
WORD = 2
"""Bytes that are moved at once: outside of an arena rows of 4 bits are no multiple of 4 bytes long."""
INDICES = ("source_rows_ptr", "source_bits_ptr", "runs_ptr", "places_ptr")
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
    steps_ptr,  # [X] bfloat16, of its rows of 4 bits; None: BITS is 16
    staging_ptr,  # [num_rows, row_bytes] uint8
    source_rows_ptr,  # [n] int32
    source_bits_ptr,  # [n] int8
    runs_ptr,  # [n] int32
    statistics_ptr,  # [D + 4 * num_runs, D] float32; not read with BITS == 16
    num_rows,
    statistic,  # place of the means among the four
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BITS: tl.constexpr,  # of the target
    BLOCK: tl.constexpr,
):
    """Encode the entries of one target."""
    i_row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_row = i_row < num_rows
    source = tl.load(source_rows_ptr + i_row, mask=m_row, other=0)
    o_d = tl.arange(0, BLOCK_D)
    m_d = (o_d < D)[None, :]
    p_stored = rows_ptr + source.to(tl.int64)[:, None] * D + o_d[None, :]
    if BITS == 16:
        stored_ptr = staging_ptr.to(tl.pointer_type(rows_ptr.dtype.element_ty), bitcast=True)
        mask = m_row[:, None] & m_d
        tl.store(stored_ptr + i_row[:, None] * D + o_d[None, :], tl.load(p_stored, mask=mask), mask=mask)
    else:
        is_moved = tl.load(source_bits_ptr + i_row, mask=m_row, other=0) == BITS
        m_stored = (m_row & ~is_moved)[:, None] & m_d
        x = tl.load(p_stored, mask=m_stored, other=0.0).to(tl.float32)
        run = tl.load(runs_ptr + i_row, mask=m_row, other=0).to(tl.int64)
        p_mean = statistics_ptr + (run * 4 + statistic + D)[:, None] * D + o_d[None, :]
        mean = tl.load(p_mean, mask=m_stored, other=0.0)
        x = tl.div_rn(x - mean, tl.load(p_mean + D, mask=m_stored, other=1.0))
        x = tl.where(x == x, tl.minimum(tl.maximum(x, -_MAX_NUMBER), _MAX_NUMBER), 0.0)
        words, step = _encode(turn(x, statistics_ptr, BLOCK, D, BLOCK_D), m_d, BLOCK=BLOCK, BLOCK_D=BLOCK_D)
        o_w = tl.arange(0, BLOCK_D // 4)
        m_w = m_row[:, None] & (o_w < D // 4)[None, :]
        m_moved = m_row & is_moved
        p_codes = row_at(rows_ptr.to(tl.pointer_type(tl.uint8), bitcast=True), source, D=D)
        p_codes = p_codes.to(tl.pointer_type(tl.int16), bitcast=True)[:, None] + o_w[None, :]
        moved = tl.load(p_codes, mask=m_moved[:, None] & m_w, other=0)
        moved_step = tl.load(steps_ptr.to(tl.pointer_type(tl.int16), bitcast=True) + source, mask=m_moved, other=0)
        p_out = staging_ptr.to(tl.pointer_type(tl.int16), bitcast=True) + i_row * (D // 4 + 1)
        tl.store(p_out[:, None] + o_w[None, :], tl.where(is_moved[:, None], moved, words), mask=m_w)
        tl.store(p_out + D // 4, tl.where(is_moved, moved_step, step), mask=m_row)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=list(INDICES))
def _write_kernel(
    rows_ptr,  # an arena, [X, D]
    steps_ptr,  # [X] bfloat16, of its rows of 4 bits; None: BITS is 16
    staging_ptr,  # [num_rows, row_bytes] uint8
    places_ptr,  # [num_rows] int32
    num_rows,
    D: tl.constexpr,
    BITS: tl.constexpr,
    WORDS: tl.constexpr,  # of a row, without its step
    BLOCK_W: tl.constexpr,  # at least as many
    BLOCK: tl.constexpr,
):
    """Write encoded rows to their places."""
    i_row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_row = i_row < num_rows
    number = tl.load(places_ptr + i_row, mask=m_row, other=0).to(tl.int64)
    o_w = tl.arange(0, BLOCK_W)
    m_w = m_row[:, None] & (o_w < WORDS)[None, :]
    p_from = staging_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
    p_to = rows_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
    if BITS == 16:
        p_from += i_row * WORDS
    else:
        p_from += i_row * (WORDS + 1)
        p_step = (p_from + WORDS).to(tl.pointer_type(tl.bfloat16), bitcast=True)
        tl.store(steps_ptr + number, tl.load(p_step, mask=m_row), mask=m_row)
    words = tl.load(p_from[:, None] + o_w[None, :], mask=m_w)
    tl.store(p_to + number[:, None] * WORDS + o_w[None, :], words, mask=m_w)


def encode_triton(encoding: Encoding) -> None:
    """Device path of :func:`kvevict_kernels.recode_rows.encode_cpu`: one launch."""
    arena, num_rows, coding = encoding.arena, encoding.rows.numel(), encoding.coding
    steps, table = steps_of(coding, encoding.bits, encoding.is_v), None if coding is None else coding.statistics.table
    if not num_rows:
        return
    _encode_kernel[(triton.cdiv(num_rows, ROW_BLOCK),)](
        *(arena, steps, encoding.out, encoding.rows, encoding.bits_of_rows, encoding.runs, table),
        *(num_rows, 2 * encoding.is_v),
        D=arena.shape[3],
        BLOCK_D=triton.next_power_of_2(arena.shape[3]),
        BITS=encoding.bits,
        BLOCK=ROW_BLOCK,
    )


def write_triton(arena: Tensor, places: Tensor, encoded: Tensor, steps: Tensor | None) -> None:
    """Device path of :func:`kvevict_kernels.recode_rows.write_cpu`: one launch; without steps rows have 16 bits."""
    num_rows, head_dim = places.numel(), arena.shape[3]
    bits = WIDTHS[steps is not None]
    words = (row_bytes(bits, head_dim, arena.element_size()) - (bits != WIDTHS[0]) * row_codec.STEP_BYTES) // WORD
    if not num_rows:
        return
    _write_kernel[(triton.cdiv(num_rows, ROW_BLOCK),)](
        *(arena, steps, encoded, places, num_rows),
        D=head_dim,
        BITS=bits,
        WORDS=words,
        BLOCK_W=triton.next_power_of_2(words),
        BLOCK=ROW_BLOCK,
    )
