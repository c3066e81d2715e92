"""Reading rows of 4 bits in Triton kernels (``row_codec.py`` has the format).

The loop over keys reads a code as a number ``1 + code / 16``, whose bits are those of the code and of a constant. The
rest is the same for all rows of a KV head, or for all numbers of a row: kernels turn queries once before the loop and
sums of values once behind it, and in the loop a row's step multiplies its score and its weight.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvevict_kernels import row_codec, row_sizes

_CODES = tl.constexpr(8)
"""Codes of a word of 32 bits."""
_MIDDLE = tl.constexpr(row_codec.MIDDLE)
_SLICE = tl.constexpr(row_sizes.GROUP)


@triton.jit
def row_at(bytes_ptr, number, D: tl.constexpr):
    """Addresses of rows of 4 bits in an arena of bytes."""
    return bytes_ptr + number.to(tl.int64) * (D // 2)


@triton.constexpr_function
def reads_in_place(rows):
    """Whether keys' codes become numbers in the registers that the products read, with so many q rows.

    With more rows every warp multiplies all keys: each converts some of them then, and all read them from shared
    memory.
    """
    return rows == 16


@triton.jit
def ones_of(positive, dtype: tl.constexpr):
    """The bits of 1 in each number of a word, for :func:`load_narrow`; ``positive`` is any number above 0.

    What the compiler does not know stays in a register: then one instruction masks a code and sets these bits.
    """
    return tl.where(positive > 0, 0x3F803F80 if dtype == tl.bfloat16 else 0x3C003C00, 0)


@triton.jit
def _units_of(o_d, dtype: tl.constexpr):
    """What :func:`load_narrow` reads of values for the number 0, and 1 / 16 of the inverse of a step, in each column.

    In bfloat16 the first and the fifth code of a word are read where they are, as ``1 + code / 128``: products are sums
    of few numbers, which makes these as exact as ``1 + code / 16``.
    """
    is_moved = ((o_d & 6) > 0) | (dtype != tl.bfloat16)
    return tl.where(is_moved, 1 + _MIDDLE / 16, 1 + _MIDDLE / 128), tl.where(is_moved, 1.0, 8.0)


@triton.jit
def _two_numbers(words, ones, first: tl.constexpr, dtype: tl.constexpr, OF_V: tl.constexpr):
    """Numbers of the codes ``first`` (below 4) and ``first + 4`` of each word.

    A code becomes the upper bits of a mantissa, in both halves of a word at once. Converting it would take long: few
    lanes of a multiprocessor can.
    """
    PLACE: tl.constexpr = 6 if dtype == tl.float16 else (0 if first == 0 and OF_V else 3)
    MOVE: tl.constexpr = PLACE - 4 * first
    both = words << MOVE if MOVE >= 0 else words >> -MOVE
    both = (both & (0x000F000F << PLACE)) | ones
    return both.to(tl.int16).to(dtype, bitcast=True), (both >> 16).to(tl.int16).to(dtype, bitcast=True)


@triton.jit
def _the_only(one, other):
    return one


@triton.jit
def load_narrow(
    rows_ptr, number, ones, D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, OF_V: tl.constexpr,
    IN_PLACE: tl.constexpr,
):  # fmt: skip
    """Codes of rows of 4 bits as numbers of the arena's dtype, [BLOCK_N, BLOCK_D]; of keys ``1 + code / 16``.

    ``number`` [BLOCK_N] (int32) are rows, ``ones`` is :func:`ones_of`. Columns are :func:`in_order`. Of values the
    numbers are those of :func:`_units_of`. Behind ``D`` they are those of code 0.
    """
    bytes_ptr = rows_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
    p_words = row_at(bytes_ptr, number, D=D).to(tl.pointer_type(tl.int32), bitcast=True)
    o_w = tl.arange(0, BLOCK_D // _CODES)
    p_words = p_words[:, None] + o_w[None, :]
    words = tl.load(p_words) if D == BLOCK_D else tl.load(p_words, mask=(o_w < D // _CODES)[None, :], other=0)
    dtype: tl.constexpr = rows_ptr.dtype.element_ty
    low_0, high_0 = _two_numbers(words, ones, 0, dtype, OF_V)
    low_1, high_1 = _two_numbers(words, ones, 1, dtype, OF_V)
    low_2, high_2 = _two_numbers(words, ones, 2, dtype, OF_V)
    low_3, high_3 = _two_numbers(words, ones, 3, dtype, OF_V)
    low = tl.join(tl.join(low_0, low_2), tl.join(low_1, low_3))
    high = tl.join(tl.join(high_0, high_2), tl.join(high_1, high_3))
    numbers = tl.join(low, high)
    if IN_PLACE:
        # What a thread multiplies of 32 channels: its four words of them, and of each of them all.
        numbers = tl.permute(tl.reshape(numbers, (BLOCK_N, 4, BLOCK_D // 32, 2, 2, 2)), (0, 2, 3, 1, 4, 5))
        numbers = tl.reshape(numbers, (BLOCK_N, BLOCK_D))
    else:
        # Where the compiler sees joined numbers it takes a layout that costs two moves for each product. It does not
        # look behind a reduction, here of one number each.
        numbers = tl.reduce(tl.reshape(numbers, (BLOCK_N, BLOCK_D, 1)), 2, _the_only)
    return numbers


@triton.jit
def load_steps(steps_ptr, number):
    """Steps of rows of 4 bits, [BLOCK_N], float32.

    They are read two at a time: copies of less than four bytes would not run beside the products.
    """
    pairs = tl.load(steps_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + (number >> 1))
    bits = (pairs >> ((number & 1) << 4)) << 16  # a bfloat16 is the upper half of a float32
    steps = bits.to(tl.float32, bitcast=True)
    # Each of them once: else every thread would do this for all columns of its scores (see load_narrow).
    return tl.reduce(tl.reshape(steps, (number.shape[0], 1)), 1, _the_only)


@triton.jit
def in_order(x, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, IN_PLACE: tl.constexpr):
    """Columns in the order of :func:`load_narrow`: of each word's codes the first, the fifth, the second, and so on."""
    if IN_PLACE:
        x = tl.permute(tl.reshape(x, (ROWS, 4, BLOCK_D // 32, 2, 2, 2)), (0, 2, 4, 1, 5, 3))
    else:
        x = tl.permute(tl.reshape(x, (ROWS, BLOCK_D // _CODES, 2, 4)), (0, 1, 3, 2))
    return tl.reshape(x, (ROWS, BLOCK_D))


@triton.jit
def _out_of_order(x, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Columns in the order of :func:`load_narrow` as they were."""
    return tl.reshape(tl.permute(tl.reshape(x, (ROWS, BLOCK_D // _CODES, 4, 2)), (0, 1, 3, 2)), (ROWS, BLOCK_D))


@triton.jit
def turn(x, table_ptr, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows [ROWS, BLOCK_D], float32, times the rotation; what is behind ``D`` may be any finite number, and is 0 then.

    That of Hadamard is sums and differences of pairs, one bit of the columns' numbers after the other.
    """
    if D == BLOCK_D and ROWS == 16:  # each step makes the lowest bit the highest one
        for i in tl.static_range(16):
            if (1 << i) < D:
                one, other = tl.split(tl.reshape(x, (ROWS, D // 2, 2)))
                x = tl.reshape(tl.permute(tl.join(one + other, one - other), (0, 2, 1)), (ROWS, D))
        x = x * (D**-0.5)
    elif D == BLOCK_D:  # numbers stay in their threads: of large tiles, to move them takes the registers of all
        for i in tl.static_range(16):
            if (1 << i) < D:
                pairs = tl.reshape(x, (ROWS, D // (2 << i), 2, 1 << i))
                twice = tl.reshape(tl.where(tl.arange(0, 2) > 0, 2.0, 0.0), (1, 1, 2, 1))
                x = tl.reshape(tl.expand_dims(tl.sum(pairs, 2), 2) - pairs * twice, (ROWS, D))
        x = x * (D**-0.5)
    else:
        o_d, o_s = tl.arange(0, BLOCK_D), tl.arange(0, _SLICE)
        slices = tl.reshape(x, (ROWS, BLOCK_D // _SLICE, _SLICE))
        place = tl.reshape(tl.arange(0, BLOCK_D // _SLICE), (1, BLOCK_D // _SLICE, 1))
        x = tl.zeros([ROWS, BLOCK_D], dtype=tl.float32)
        for i in range(D // _SLICE):
            p_rotation = table_ptr + (o_s + i * _SLICE)[:, None] * D + o_d[None, :]
            rotation = tl.load(p_rotation, mask=(o_d < D)[None, :], other=0.0)
            x = tl.dot(tl.sum(tl.where(place == i, slices, 0.0), 1), rotation, x, input_precision="tf32x3")
    return x


@triton.jit
def _load_statistics(table_ptr, layer, head, which, o_d, H: tl.constexpr, D: tl.constexpr):
    """Means (``which`` 0 of keys, 2 of values) or scales (1, 3) of a KV head, [BLOCK_D]."""
    first = (D + (layer.to(tl.int64) * H + head) * 4 + which) * D
    return tl.load(table_ptr + first + o_d, mask=o_d < D, other=0.0)


@triton.jit
def turned_queries(b_q, table_ptr, layer, head, o_d, scale_log2, H: tl.constexpr, D: tl.constexpr):
    """Queries for what :func:`load_narrow` reads.

    Returns:
        them, times 16 (what is read has steps of 1/16) and the scale of scores; what their products begin with; and
        what is to be added to the scores then, [BLOCK_M] each.
    """
    ROWS: tl.constexpr = b_q.shape[0]
    BLOCK_D: tl.constexpr = b_q.shape[1]
    mean = _load_statistics(table_ptr, layer, head, 0, o_d, H=H, D=D)
    scale = _load_statistics(table_ptr, layer, head, 1, o_d, H=H, D=D)
    numbers = b_q.to(tl.float32) * scale_log2
    turned = turn(numbers * (16.0 * scale)[None, :], table_ptr, ROWS=ROWS, D=D, BLOCK_D=BLOCK_D)
    IN_PLACE: tl.constexpr = reads_in_place(ROWS)
    turned = in_order(turned, ROWS=ROWS, BLOCK_D=BLOCK_D, IN_PLACE=IN_PLACE).to(b_q.dtype)
    # The sum of the numbers as they are multiplied: else what is read for 0 would not give 0.
    return turned, -tl.sum(turned.to(tl.float32), 1) * (1 + _MIDDLE / 16), tl.sum(numbers * mean[None, :], 1)


@triton.jit
def with_values(
    b_out, b_weight, b_sum, table_ptr, layer, head, o_d, dtype: tl.constexpr, H: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """Weighted sums [BLOCK_M, BLOCK_D] of values from those of what :func:`load_narrow` reads.

    ``b_weight`` [BLOCK_M] are the sums of these weights, with the rows' steps, ``b_sum`` those without them.
    """
    ROWS: tl.constexpr = b_out.shape[0]
    BLOCK_D: tl.constexpr = b_out.shape[1]
    mean = _load_statistics(table_ptr, layer, head, 2, o_d, H=H, D=D)
    scale = _load_statistics(table_ptr, layer, head, 3, o_d, H=H, D=D)
    zero, unit = _units_of(o_d, dtype)
    numbers = (b_out - b_weight[:, None] * zero[None, :]) * unit[None, :]
    numbers = _out_of_order(numbers, ROWS=ROWS, BLOCK_D=BLOCK_D)
    turned = turn(numbers, table_ptr, ROWS=ROWS, D=D, BLOCK_D=BLOCK_D)
    return turned * (16.0 * scale)[None, :] + b_sum[:, None] * mean[None, :]


@triton.jit
def head_slot_of(layer, token_slot, lane, num_token_slots, num_kv_heads):
    """:func:`kvevict_kernels.row_sizes.head_slot_of` without annotations, which Triton's compiler rejects."""
    return (layer * num_token_slots + token_slot) * num_kv_heads + lane
