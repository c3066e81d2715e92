"""recode_rows on the device: for K, then V, launches that encode into a temporary, then launches that write.

They are ordered by the stream.

So nothing depends on the order of programs, however sources and targets overlap. The arithmetic is that of
``row_codec.py``, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvevict_kernels.recode_rows import Encoding, Target, staged_rows
from kvevict_kernels.row_codec import GROUP, RowStatistics, row_bytes
from kvevict_kernels.triton_rows import eighths, narrow_row_at

ROW_BLOCK = 16
"""Rows of a program; it holds all of their numbers."""
WORD = 4
"""Bytes that are moved at once."""
INDICES = ("source_rows_ptr", "source_bits_ptr", "runs_ptr", "places_ptr")
"""Not specialised on alignment, which varies by call and would cause recompilation."""


@triton.jit
def _encode_8(x):
    """float8 e4m3fn, as int32, rounded to nearest, ties to even; larger numbers saturate."""
    y = tl.minimum(tl.maximum(x, -448.0), 448.0)
    sign = (y.to(tl.int32, bitcast=True) >> 24) & 0x80
    size = tl.abs(y)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    # Below 2**-6 all steps are 2**-9, as those of float32 from 2**14 on.
    small = (size + 16384.0).to(tl.int32, bitcast=True) & 15
    return sign | tl.where(size < 0.015625, small, normal)


@triton.jit
def _encode_4(x):
    """Codes of groups [BLOCK, GROUPS, 2, GROUP / 2], as int32, and a word [BLOCK, GROUPS] of scale and minimum."""
    x = tl.minimum(tl.maximum(x, -65504.0), 65504.0)
    low, high = tl.min(tl.min(x, 3), 2), tl.max(tl.max(x, 3), 2)
    scale, minimum = tl.div_rn(high - low, 15.0).to(tl.float16), low.to(tl.float16)
    step = scale.to(tl.float32)
    step = tl.where(step > 0.0, step, float("inf"))
    steps = tl.div_rn(x - minimum.to(tl.float32)[:, :, None, None], tl.broadcast_to(step[:, :, None, None], x.shape))
    codes = tl.minimum(tl.maximum(tl.floor(steps + 0.5), 0.0), 15.0).to(tl.int32)
    word = scale.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return codes, word | (minimum.to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit(do_not_specialize=["num_rows", "statistic"], do_not_specialize_on_alignment=list(INDICES))
def _encode_kernel(
    rows_ptr,  # an arena, [X, D]
    staging_ptr,  # [num_rows, row_bytes] uint8
    source_rows_ptr,  # [n] int32
    source_bits_ptr,  # [n] int8
    runs_ptr,  # [n] int32
    statistics_ptr,  # [num_runs, 4, D] float32; not read with BITS == 16
    num_rows,
    statistic,  # place of the means among the four
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,  # of the target
    ROW_BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Encode the entries of one target."""
    i_row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_row = i_row < num_rows
    source = tl.load(source_rows_ptr + i_row, mask=m_row, other=0)
    bits = tl.load(source_bits_ptr + i_row, mask=m_row, other=0).to(tl.int32)
    if BITS == 16:
        o_d = tl.arange(0, BLOCK_D)
        mask = m_row[:, None] & (o_d < D)[None, :]
        b_rows = tl.load(rows_ptr + source.to(tl.int64)[:, None] * D + o_d[None, :], mask=mask)
        stored_ptr = staging_ptr.to(tl.pointer_type(rows_ptr.dtype.element_ty), bitcast=True)
        tl.store(stored_ptr + i_row[:, None] * D + o_d[None, :], b_rows, mask=mask)
    else:
        HALF: tl.constexpr = GROUP // 2
        o_g, o_h, o_j = tl.arange(0, BLOCK_D // GROUP), tl.arange(0, 2), tl.arange(0, HALF)
        o_d = o_g[:, None, None] * GROUP + o_h[None, :, None] * HALF + o_j[None, None, :]  # channels
        m_g = (o_g < D // GROUP)[None, :]
        m_stored, m_8 = (m_row & (bits == 16))[:, None] & m_g, (m_row & (bits == 8))[:, None] & m_g
        p_stored = rows_ptr + source.to(tl.int64)[:, None, None, None] * D + o_d[None, :, :, :]
        x = tl.load(p_stored, mask=m_stored[:, :, None, None], other=0.0).to(tl.float32)
        run = tl.load(runs_ptr + i_row, mask=m_row, other=0).to(tl.int64)
        p_mean = statistics_ptr + (run * 4 + statistic)[:, None, None, None] * D + o_d[None, :, :, :]
        mean = tl.load(p_mean, mask=m_stored[:, :, None, None], other=0.0)
        x = tl.div_rn(x - mean, tl.load(p_mean + D, mask=m_stored[:, :, None, None], other=1.0))
        bytes_ptr = rows_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
        p_8 = bytes_ptr + source.to(tl.int64)[:, None, None, None] * D + o_d[None, :, :, :]
        codes_8 = tl.load(p_8, mask=m_8[:, :, None, None], other=0)
        p_staging = staging_ptr + i_row * ROW_BYTES
        m_out = m_row[:, None] & m_g
        if BITS == 8:
            codes = tl.where((bits == 8)[:, None, None, None], codes_8.to(tl.int32), _encode_8(x))
            p_out = p_staging[:, None, None, None] + o_d[None, :, :, :]
            tl.store(p_out, codes.to(tl.uint8), mask=m_out[:, :, None, None])
        else:
            codes, word = _encode_4(tl.where((bits == 8)[:, None, None, None], eighths(codes_8), x))
            packed = tl.sum(codes << (o_h * 4)[None, None, :, None], 2)  # [BLOCK, GROUPS, HALF]
            m_4 = (m_row & (bits == 4))[:, None] & m_g
            p_codes, p_word = narrow_row_at(bytes_ptr, source, D=D, BITS=4)
            o_byte = o_g[:, None] * HALF + o_j[None, :]
            moved = tl.load(p_codes[:, None, None] + o_byte[None, :, :], mask=m_4[:, :, None], other=0)
            p_word = (p_word[:, None] + o_g[None, :] * 4).to(tl.pointer_type(tl.int32), bitcast=True)
            moved_word = tl.load(p_word, mask=m_4, other=0)
            packed = tl.where((bits == 4)[:, None, None], moved.to(tl.int32), packed)
            word = tl.where((bits == 4)[:, None], moved_word, word)
            tl.store(p_staging[:, None, None] + o_byte[None, :, :], packed.to(tl.uint8), mask=m_out[:, :, None])
            p_word_out = p_staging[:, None] + D // 2 + o_g[None, :] * 4
            tl.store(p_word_out.to(tl.pointer_type(tl.int32), bitcast=True), word, mask=m_out)


@triton.jit
def _move_bytes(p_from, p_to, m_row, NUM: tl.constexpr, BLOCK_W: tl.constexpr):
    """Copy ``NUM`` bytes from and to each of the addresses [BLOCK], in words."""
    o = tl.arange(0, BLOCK_W)
    mask = m_row[:, None] & (o < NUM // 4)[None, :]
    p_from = p_from.to(tl.pointer_type(tl.int32), bitcast=True)
    p_to = p_to.to(tl.pointer_type(tl.int32), bitcast=True)
    words = tl.load(p_from[:, None] + o[None, :], mask=mask)
    tl.store(p_to[:, None] + o[None, :], words, mask=mask)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=list(INDICES))
def _write_kernel(
    rows_ptr,  # an arena, [X, D]
    staging_ptr,  # [num_rows, row_bytes] uint8
    places_ptr,  # [num_rows] int32
    num_rows,
    D: tl.constexpr,
    BITS: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    BLOCK_W: tl.constexpr,  # words of a row, at least
    BLOCK: tl.constexpr,
):
    """Write encoded rows to their places."""
    i_row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_row = i_row < num_rows
    number = tl.load(places_ptr + i_row, mask=m_row, other=0)
    bytes_ptr = rows_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
    p_staging = staging_ptr + i_row * ROW_BYTES
    if BITS == 4:
        p_codes, p_header = narrow_row_at(bytes_ptr, number, D=D, BITS=4)
        _move_bytes(p_staging, p_codes, m_row, NUM=D // 2, BLOCK_W=BLOCK_W)
        _move_bytes(p_staging + D // 2, p_header, m_row, NUM=ROW_BYTES - D // 2, BLOCK_W=BLOCK_W)
    else:
        _move_bytes(p_staging, bytes_ptr + number.to(tl.int64) * ROW_BYTES, m_row, NUM=ROW_BYTES, BLOCK_W=BLOCK_W)


def recode_rows_triton(
    k_arena: Tensor,
    v_arena: Tensor,
    source_rows: Tensor,
    source_bits: Tensor,
    runs: Tensor,
    targets: Sequence[Target],
    statistics: RowStatistics | None,
    temporary: Tensor,
) -> None:
    """Device path of :func:`kvevict_kernels.recode_rows.recode_rows`: two launches per arena and target."""
    staged = staged_rows(k_arena, targets, temporary)
    for is_v, arena in enumerate((k_arena, v_arena)):
        first = 0
        for staging, (places, bits) in zip(staged, targets, strict=True):
            entries = slice(first, first := first + places.numel())
            own = (source_rows[entries], source_bits[entries], runs[entries])
            if places.numel():
                encode_triton(Encoding(arena, is_v, *own, bits, statistics, staging))
        for staging, (places, bits) in zip(staged, targets, strict=True):
            if places.numel():
                write_triton(arena, places, bits, staging)


def encode_triton(encoding: Encoding) -> None:
    """Device path of :func:`kvevict_kernels.recode_rows.encode_cpu`: one launch."""
    arena, num_rows, head_dim = encoding.arena, encoding.rows.numel(), encoding.arena.shape[3]
    by_run = torch.empty(0, device=arena.device) if encoding.statistics is None else encoding.statistics.by_run()
    _encode_kernel[(triton.cdiv(num_rows, ROW_BLOCK),)](
        *(
            arena,
            encoding.out,
            encoding.rows,
            encoding.bits_of_rows,
            encoding.runs,
            by_run,
            num_rows,
            2 * encoding.is_v,
        ),
        BLOCK_D=triton.next_power_of_2(head_dim),
        GROUP=GROUP,
        **_sizes(head_dim, encoding.bits, arena.element_size()),
    )


def write_triton(arena: Tensor, places: Tensor, bits: int, encoded: Tensor) -> None:
    """Device path of :func:`kvevict_kernels.recode_rows.write_cpu`: one launch."""
    num_rows, sizes = places.numel(), _sizes(arena.shape[3], bits, arena.element_size())
    _write_kernel[(triton.cdiv(num_rows, ROW_BLOCK),)](
        *(arena, encoded, places, num_rows), BLOCK_W=triton.next_power_of_2(sizes["ROW_BYTES"] // WORD), **sizes
    )


def _sizes(head_dim: int, bits: int, itemsize: int) -> dict[str, int]:
    """Constants of both kernels."""
    num_bytes = row_bytes(bits, head_dim, itemsize)
    return {"D": head_dim, "BITS": bits, "ROW_BYTES": num_bytes, "BLOCK": ROW_BLOCK, "num_warps": 4}
