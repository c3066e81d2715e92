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
def _number_8(words, byte: tl.constexpr, dtype: tl.constexpr):
    """Numbers of float8 e4m3fn in one byte of each word: the bits are those of a float32 of 2**-120 of it."""
    bits = ((words << (24 - 8 * byte)) >> 4) & -2014314496  # 0x87F00000
    return (bits.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(dtype)


@triton.jit
def _number_4(words, code: tl.constexpr, step, first, dtype: tl.constexpr):
    """``first + step * (1 + code / 16)`` of one of the eight codes of each word.

    A code becomes the upper bits of a mantissa. Converting it would take long: few lanes of a multiprocessor can.
    """
    moved = words << (19 - 4 * code) if code < 5 else words >> (4 * code - 19)
    return (((moved & 0x780000) | 0x3F800000).to(tl.float32, bitcast=True) * step + first).to(dtype)


@triton.jit
def _four(number_0, number_1, number_2, number_3):
    """Numbers [...] of the four bytes of each word, in order: [..., 2, 2]."""
    return tl.join(tl.join(number_0, number_2), tl.join(number_1, number_3))


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
    p_words = p_codes.to(tl.pointer_type(tl.int32), bitcast=True)
    if BITS == 8:
        o_w = tl.arange(0, BLOCK_D // 4)
        words = tl.load(p_words[:, None] + o_w[None, :], mask=m_n[:, None] & (o_w < D // 4)[None, :], other=0)
        numbers = _four(
            _number_8(words, 0, dtype), _number_8(words, 1, dtype), _number_8(words, 2, dtype),
            _number_8(words, 3, dtype),
        )  # fmt: skip
    else:
        WORDS: tl.constexpr = _GROUP // 8  # of codes, in a group
        o_g, o_w = tl.arange(0, BLOCK_D // _GROUP), tl.arange(0, WORDS)
        m_g = m_n[:, None] & (o_g < D // _GROUP)[None, :]
        o_word = o_g[:, None] * WORDS + o_w[None, :]
        words = tl.load(p_words[:, None, None] + o_word[None, :, :], mask=m_g[:, :, None], other=0)
        p_header = (p_header[:, None] + o_g[None, :] * 4).to(tl.pointer_type(tl.int32), bitcast=True)
        scale, minimum = halves_of(tl.load(p_header, mask=m_g, other=0))
        step = (16.0 * scale)[:, :, None]
        first = minimum[:, :, None] - step
        low = _four(
            _number_4(words, 0, step, first, dtype), _number_4(words, 2, step, first, dtype),
            _number_4(words, 4, step, first, dtype), _number_4(words, 6, step, first, dtype),
        )  # fmt: skip
        high = _four(
            _number_4(words, 1, step, first, dtype), _number_4(words, 3, step, first, dtype),
            _number_4(words, 5, step, first, dtype), _number_4(words, 7, step, first, dtype),
        )  # fmt: skip
        # [BLOCK_N, groups, WORDS, 2, 2, 2]: the last one is the half of a byte, and the second in the row.
        numbers = tl.permute(tl.join(low, high), (0, 1, 5, 2, 3, 4))
    numbers = tl.reshape(numbers, (BLOCK_N, BLOCK_D))
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


@triton.jit
def head_slot_of(layer, token_slot, lane, num_token_slots, num_kv_heads):
    """:func:`kvevict_kernels.head_slots.head_slot_of` without annotations, which Triton's compiler rejects."""
    return (layer * num_token_slots + token_slot) * num_kv_heads + lane
