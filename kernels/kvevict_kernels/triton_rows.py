"""Reading rows of 8 and 4 bits in Triton kernels (``row_codec.py`` has the format).

Rows are read as normalised numbers. What undoes that is the same for all rows of a KV head, so kernels apply it to
queries and results: keys' deviation multiplies the query and their mean is an offset of its scores; values' deviation
and mean are applied to the weighted sum.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvevict_kernels import row_codec

_GROUP = tl.constexpr(row_codec.GROUP)
_PARTS_4 = tl.constexpr(row_codec.PARTS[4])


@triton.jit
def eighths(codes):
    """Numbers of float8 e4m3fn, given as uint8, in float32: the bits are those of a float16 of 1/256 of it."""
    shifted = codes.to(tl.int8, bitcast=True).to(tl.int16) << 7
    return (shifted & -16512).to(tl.float16, bitcast=True).to(tl.float32) * 256.0  # 0xBF80


@triton.jit
def halves_of(words):
    """The float16 numbers in the lower and the upper half of int32, as float32: scale and minimum of a group."""
    low = (words & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    high = (words >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def narrow_row_at(bytes_ptr, number, D: tl.constexpr, BITS: tl.constexpr):
    """Addresses of rows of 8 or 4 bits in an arena of bytes: of codes, and of scales and minima (4 bits)."""
    if BITS == 8:
        p_codes = bytes_ptr + number.to(tl.int64) * D
        p_header = p_codes
    else:
        block, part = number // _PARTS_4, number % _PARTS_4
        p_block = bytes_ptr + block.to(tl.int64) * (2 * D)
        p_codes = p_block + part * (D // 2)
        p_header = p_block + (_PARTS_4 * D // 2 + part * (4 * D // _GROUP))
    return p_codes, p_header


@triton.jit
def load_narrow(
    rows_ptr, number, m_n, dtype: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BITS: tl.constexpr,
):  # fmt: skip
    """Normalised numbers of rows of 8 or 4 bits, [BLOCK_N, BLOCK_D], in ``dtype``; 0 behind ``D``.

    ``rows_ptr`` is an arena, of any dtype, ``number`` [BLOCK_N] (int32) are the rows that ``m_n`` marks.
    """
    bytes_ptr = rows_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
    p_codes, p_header = narrow_row_at(bytes_ptr, number, D=D, BITS=BITS)
    if BITS == 8:
        o_d = tl.arange(0, BLOCK_D)
        codes = tl.load(p_codes[:, None] + o_d[None, :], mask=m_n[:, None] & (o_d < D)[None, :], other=0)
        numbers = eighths(codes).to(dtype)
    else:
        HALF: tl.constexpr = _GROUP // 2
        o_g, o_j = tl.arange(0, BLOCK_D // _GROUP), tl.arange(0, HALF)
        m_g = m_n[:, None] & (o_g < D // _GROUP)[None, :]
        o_byte = o_g[:, None] * HALF + o_j[None, :]
        codes = tl.load(p_codes[:, None, None] + o_byte[None, :, :], mask=m_g[:, :, None], other=0)
        p_words = (p_header[:, None] + o_g[None, :] * 4).to(tl.pointer_type(tl.int32), bitcast=True)
        scale, minimum = halves_of(tl.load(p_words, mask=m_g, other=0))
        low = (codes & 15).to(tl.float32) * scale[:, :, None] + minimum[:, :, None]
        high = (codes >> 4).to(tl.float32) * scale[:, :, None] + minimum[:, :, None]
        halves = tl.permute(tl.join(low.to(dtype), high.to(dtype)), (0, 1, 3, 2))  # [BLOCK_N, groups, 2, HALF]
        numbers = tl.reshape(halves, (BLOCK_N, BLOCK_D))
    return numbers


@triton.jit
def _load_statistics(statistics_ptr, layer, head, which, o_d, H: tl.constexpr, D: tl.constexpr):
    """Means (``which`` 0 of keys, 2 of values) or deviations (1, 3) of a KV head, [BLOCK_D]."""
    first = ((layer.to(tl.int64) * H + head) * 4 + which) * D
    return tl.load(statistics_ptr + first + o_d, mask=o_d < D, other=0.0)


@triton.jit
def normalised_queries(b_q, statistics_ptr, layer, head, o_d, H: tl.constexpr, D: tl.constexpr):
    """Queries for normalised keys, and what is to be added to their scores, [BLOCK_M], not scaled yet."""
    mean = _load_statistics(statistics_ptr, layer, head, 0, o_d, H=H, D=D)
    deviation = _load_statistics(statistics_ptr, layer, head, 1, o_d, H=H, D=D)
    numbers = b_q.to(tl.float32)
    return (numbers * deviation[None, :]).to(b_q.dtype), tl.sum(numbers * mean[None, :], 1)


@triton.jit
def with_values(b_out, b_sum, statistics_ptr, layer, head, o_d, H: tl.constexpr, D: tl.constexpr):
    """Weighted sums [BLOCK_M, BLOCK_D] of values from those of normalised ones, with sums of weights [BLOCK_M]."""
    mean = _load_statistics(statistics_ptr, layer, head, 2, o_d, H=H, D=D)
    deviation = _load_statistics(statistics_ptr, layer, head, 3, o_d, H=H, D=D)
    return b_out * deviation[None, :] + b_sum[:, None] * mean[None, :]
