"""ragged_extend on the device: one program per tile of q rows of one KV head loops over its keys, or a part of them.

A request with few tiles leaves most of the device idle, so the keys of its tiles (path, then own tokens) are split into
parts, which a second launch merges. The host computes the number of parts from the request's lengths (chunks.py), the
device their bounds. Rows of each number of bits are parts of their own, in launches of their own.

Masks are applied only to blocks that some row of the tile does not see entirely. Behind the last key the last one is
read again, so that no copy needs a mask.

Spans and own tokens share one loop nest: with two, ptxas serialises the tensor-core instructions of both. The inner
loop begins at a difference of two numbers: a single one that shrinks from run to run is compiled wrongly (Triton 3.6 to
3.8 keep its first value; seen on an H200).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvevict_kernels.device_limits import limits_of
from kvevict_kernels.ragged_decode import triton_addresses as at
from kvevict_kernels.ragged_decode.addresses import TableAddresses
from kvevict_kernels.ragged_decode.tables import LayerInputs, Step
from kvevict_kernels.ragged_decode.tile_table import EXTEND, block_widths, narrow_keys, tiles_for
from kvevict_kernels.ragged_decode.triton_block import (
    LOG2_E,
    add_narrow_block,
    hidden_keys,
    hide_branches,
    load_queries,
    load_tree,
    narrow_sums,
    score_narrow_block,
)
from kvevict_kernels.row_sizes import WIDTHS
from kvevict_kernels.triton_rows import head_slot_of, ones_of, turned_queries, with_values

COMBINE_ROWS = 16


@triton.jit
def _run_len(j, first_unit, addresses_ptr, H: tl.constexpr, BITS: tl.constexpr):
    """Length of a span's run; 0 where its rows have another number of bits. ``BITS`` None: all spans have 16."""
    span = tl.load(at.int32s_at(addresses_ptr, at.PATH_SPAN) + j)
    num_kv = tl.load(at.int32s_at(addresses_ptr, at.RUN_LENS) + first_unit + span * H)
    if BITS is not None:
        num_kv = tl.where(tl.load(at.int32s_at(addresses_ptr, at.SPAN_BITS) + span) == BITS, num_kv, 0)
    return num_kv


@triton.jit
def _run_of(
    j, path_end, first_unit, num_own, own_address, addresses_ptr, H: tl.constexpr, BITS: tl.constexpr
):  # fmt: skip
    """Length and address of a span's run, or of the own tokens after the last span."""
    if j < path_end:
        unit = first_unit + tl.load(at.int32s_at(addresses_ptr, at.PATH_SPAN) + j) * H
        num_kv = _run_len(j, first_unit, addresses_ptr, H=H, BITS=BITS)
        address = tl.load(at.int64s_at(addresses_ptr, at.RUN_ADDRESS) + unit)
    else:
        num_kv = num_own
        address = own_address
    return num_kv, address


@triton.jit
def _path_of(request, layer, head, addresses_ptr, H: tl.constexpr):
    """Begin and end of a request's path, and the unit of this layer and head in the first span."""
    p_path = at.int32s_at(addresses_ptr, at.PATH_START) + request
    first_unit = layer * tl.load(addresses_ptr + at.NUM_SPANS).to(tl.int32) * H + head
    return tl.load(p_path), tl.load(p_path + 1), first_unit


@triton.jit
def _rows_of(is_own, layer, head, num_token_slots, H: tl.constexpr, D: tl.constexpr):
    """Rows from one index to the next, and elements to index 0: runs hold head slots, the own tokens token slots.

    Rows of a layer fit 32 bits, as head slots do: a product with the width of a row, a constant, is one instruction.
    """
    shift = tl.where(is_own > 0, head_slot_of(layer.to(tl.int64), 0, head, num_token_slots, H), 0)
    return tl.where(is_own > 0, H, 1), shift * D


@triton.jit
def _part_of(
    path_begin, path_end, first_unit, num_own, split, num_splits, addresses_ptr, H: tl.constexpr, BLOCK_N: tl.constexpr,
    BITS: tl.constexpr,
):  # fmt: skip
    """Begin and end of one part of the keys (spans, then own tokens), in whole blocks."""
    total = num_own
    for j in range(path_begin, path_end):
        total += _run_len(j, first_unit, addresses_ptr, H=H, BITS=BITS)
    # Whole blocks: a part that ends within one would read and mask it twice.
    length = tl.cdiv(tl.cdiv(total, BLOCK_N), num_splits) * BLOCK_N
    return split * length, tl.minimum((split + 1) * length, total)


@triton.jit
def _own_keys(
    request, token, depth, count, window, addresses_ptr, seq_lens_ptr, pool_rows_ptr, req_to_token, row_stride,
    WINDOWED: tl.constexpr,
):  # fmt: skip
    """A request's own tokens, as a tile of its q rows sees them; ``depth``: positions behind the first new token.

    Returns:
        own tokens before the first new one, own tokens up to the tile's last one, the address of their token slots, and
        [BLOCK_M], the last position that a row does not see.
    """
    compressed_len = tl.load(at.int32s_at(addresses_ptr, at.COMPRESSED_LENS) + request)
    end = tl.load(seq_lens_ptr + request)
    num_before = end - compressed_len - count
    num_own = num_before + tl.minimum(tl.max(token, 0) + 1, count)
    address = req_to_token + (tl.load(pool_rows_ptr + request) * row_stride + compressed_len) * 4
    hidden = end - count + depth - window
    if WINDOWED:  # keys that no row of the tile sees are left out of the parts
        num_hidden = tl.maximum(num_before + tl.min(depth, 0) + 1 - window, 0)
        num_before -= num_hidden
        num_own -= num_hidden
        address += num_hidden * 4
    return num_before, num_own, address, hidden


@triton.jit
def _first_row(request, addresses_ptr):
    """Row of a request's first new token."""
    member = tl.load(at.int32s_at(addresses_ptr, at.REQUEST_MEMBERS) + request)
    return tl.load(at.int32s_at(addresses_ptr, at.MEMBERS) + member).to(tl.int64)


@triton.jit
def _add_sink(b_max, b_sum, b_out, p_sink, m_sink):
    """Add sink logits [BLOCK_M] to the softmax of the rows that ``m_sink`` marks."""
    sink = 1.4426950408889634 * tl.load(p_sink, mask=m_sink, other=float("-inf")).to(tl.float32)
    new_max = tl.maximum(b_max, sink)
    base = tl.where(new_max == float("-inf"), 0.0, new_max)
    decay = tl.exp2(b_max - base)
    return new_max, b_sum * decay + tl.exp2(sink - base), b_out * decay[:, None]


@triton.jit
def _store(out_ptr, lse_ptr, row, b_max, b_sum, b_out, out_scale, lse_scale, o_d, m_m, D: tl.constexpr):
    """Write rows [BLOCK_M] of an output and their log-sum-exps."""
    divisor = tl.where(b_sum > 0.0, b_sum, 1.0)
    p_out = out_ptr + row[:, None] * D + o_d[None, :]
    tl.store(p_out, b_out / divisor[:, None] * out_scale, mask=m_m[:, None] & (o_d < D)[None, :])
    b_lse = tl.where(b_sum > 0.0, b_max + tl.log2(divisor), float("-inf"))
    tl.store(lse_ptr + row, b_lse * lse_scale, mask=m_m)


@triton.jit
def _store_part(
    out_ptr, lse_ptr, addresses_ptr, request, head, first, count, i_row, split, num_splits, b_max, b_sum, b_out,
    v_scale, o_d, m_m, H: tl.constexpr, G: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """Write a tile's q rows ``i_row`` [BLOCK_M], or what one of several parts of the keys adds to them."""
    if num_splits > 1:
        partial_out_ptr = at.floats_at(addresses_ptr, at.PARTIAL_OUT)
        partial_lse_ptr = at.floats_at(addresses_ptr, at.PARTIAL_LSE)
        row = tl.load(at.int64s_at(addresses_ptr, at.EXTEND_PARTIAL) + request)
        row += (split * H + head).to(tl.int64) * (count * G) + i_row
        _store(partial_out_ptr, partial_lse_ptr, row, b_max, b_sum, b_out, 1.0, 1.0, o_d, m_m, D=DV)
    else:
        row = (first + i_row // G) * (H * G) + head * G + i_row % G
        _store(out_ptr, lse_ptr, row, b_max, b_sum, b_out, v_scale, 0.6931471805599453, o_d, m_m, D=DV)


@triton.jit
def _hide_keys(j, is_own, address, num_kv, to_key, hidden, m_m, addresses_ptr):
    """Positions of a run's entries, whether some row of the tile does not see all of them, and where to stop."""
    span = tl.load(at.int32s_at(addresses_ptr, at.PATH_SPAN) + j, mask=is_own == 0, other=0)
    to_positions = tl.load(at.int64s_at(addresses_ptr, at.SPAN_POSITIONS) + span, mask=is_own == 0, other=0)
    position_ptr = (address + to_positions).to(tl.pointer_type(tl.int32))
    is_hidden, is_cut = hidden_keys(position_ptr, num_kv, is_own == 0, hidden, m_m)
    return position_ptr, is_cut, tl.where(is_hidden, 0, to_key)


@triton.jit
def _load_block(rows_ptr, row, o_d, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """The first ``D`` columns of rows, [BLOCK_N, BLOCK_D], that begin at ``row`` (elements)."""
    p_rows = rows_ptr + row[:, None] + o_d[None, :]
    return tl.load(p_rows) if D == BLOCK_D else tl.load(p_rows, mask=(o_d < D)[None, :], other=0.0)


@triton.jit
def _score_block(
    b_q, b_rot, k_ptr, v_ptr, row, o_d, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_ROT: tl.constexpr,
):  # fmt: skip
    """Scores [BLOCK_M, BLOCK_N], not scaled yet, and values of rows that begin at ``row``; a latent is both."""
    b_k = _load_block(k_ptr, row, o_d, D=DV, BLOCK_D=BLOCK_D).to(b_q.dtype)
    if BLOCK_ROT > 0:
        b_v = b_k
        o_rot = tl.arange(0, BLOCK_ROT)
        b_k_rot = _load_block(k_ptr + DV, row, o_rot, D=D - DV, BLOCK_D=BLOCK_ROT).to(b_q.dtype)
        s = tl.dot(b_rot, tl.trans(b_k_rot), input_precision="ieee")
        s = tl.dot(b_q, tl.trans(b_k), s, input_precision="ieee")
    else:
        b_v = _load_block(v_ptr, row, o_d, D=DV, BLOCK_D=BLOCK_D).to(b_q.dtype)
        s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
    return s, b_v


@triton.jit
def _add_block(b_max, b_sum, b_out, s, b_v, scale_log2):
    """Add one block of scores [BLOCK_M, BLOCK_N], not scaled yet, and its values to a running softmax."""
    new_max = tl.maximum(b_max, tl.max(s, 1) * scale_log2)
    p = tl.exp2(s * scale_log2 - new_max[:, None])
    decay = tl.exp2(b_max - new_max)
    b_sum = b_sum * decay + tl.sum(p, 1)
    b_out = tl.dot(p.to(b_v.dtype), b_v, b_out * decay[:, None], input_precision="ieee")
    return new_max, b_sum, b_out


@triton.jit(
    do_not_specialize=["layer", "row_stride", "req_to_token", "window", "first_tile"],
    do_not_specialize_on_alignment=["sink_logits_ptr", "seq_lens_ptr", "pool_rows_ptr", "visible_ptr"],
)
def _extend_kernel(
    addresses_ptr,
    q_ptr,  # [N, H * G, D], tokens q_stride elements apart
    k_ptr,  # [L, T, H, D]
    v_ptr,
    k_steps_ptr,  # [X] bfloat16, steps of rows of 4 bits; None: all rows have 16
    v_steps_ptr,
    sink_logits_ptr,  # [H * G], or None
    out_ptr,  # [N, H * G, DV]
    lse_ptr,  # [N, H * G] float32, natural
    seq_lens_ptr,
    pool_rows_ptr,
    visible_ptr,  # [N] int64, or None
    statistics_ptr,  # [D + 4 * L * H, D] float32; None: all rows have 16 bits
    req_to_token,  # address of [rows, row_stride] int32
    layer,
    row_stride,
    num_token_slots,
    q_stride,
    scale_log2,
    v_scale,
    window,  # tokens that a query sees; read if WINDOWED
    first_tile,  # of this number of bits
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,  # columns of values; fewer than D: they are the first ones of the keys (latents)
    BLOCK_M: tl.constexpr,
    WINDOWED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,  # at least DV
    BLOCK_ROT: tl.constexpr,  # at least D - DV; 0: not latents
    BITS: tl.constexpr,  # of the spans' rows that the launch reads; own tokens belong to 16
    UPCAST: tl.constexpr,
):
    OF_SPANS: tl.constexpr = None if statistics_ptr is None else BITS
    i_tile = first_tile + tl.program_id(0)
    request = tl.load(at.int32s_at(addresses_ptr, at.TILE_REQUEST) + i_tile)
    head, o_d = tl.program_id(1), tl.arange(0, BLOCK_D)
    count = tl.load(at.int32s_at(addresses_ptr, at.NEW_LENS_DEVICE) + request)
    i_row = tl.load(at.int32s_at(addresses_ptr, at.TILE_INDEX) + i_tile) * BLOCK_M + tl.arange(0, BLOCK_M)
    m_m, token = i_row < count * G, i_row // G
    first = _first_row(request, addresses_ptr)
    q_row = (first + token) * q_stride + (head * G + i_row % G) * D
    b_q, b_rot = load_queries(q_ptr, q_row, m_m, o_d, D=D, DV=DV, BLOCK_ROT=BLOCK_ROT, UPCAST=UPCAST)
    b_max, b_sum = tl.full([BLOCK_M], -3.0e38, dtype=tl.float32), tl.zeros([BLOCK_M], dtype=tl.float32)
    b_out = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    visible, depth = load_tree(visible_ptr, first + token, token, m_m)
    num_before, num_own, own_address, hidden = _own_keys(
        request, token, depth, count, window, addresses_ptr, seq_lens_ptr, pool_rows_ptr, req_to_token, row_stride,
        WINDOWED=WINDOWED,
    )  # fmt: skip
    path_begin, path_end, first_unit = _path_of(request, layer, head, addresses_ptr, H=H)
    num_splits = tl.load(at.int32s_at(addresses_ptr, at.NUM_SPLITS) + request)
    split, passed = tl.load(at.int32s_at(addresses_ptr, at.TILE_SPLIT) + i_tile), 0  # keys of earlier runs
    share = tl.load(at.int32s_at(addresses_ptr, at.TILE_SHARE) + i_tile)
    shares = tl.load(at.int32s_at(addresses_ptr, at.TILE_SHARES) + i_tile)
    if BITS < 16:
        num_own = num_own * 0
        stored: tl.constexpr = k_ptr.dtype.element_ty
        b_q, b_zero, b_offset = turned_queries(b_q, statistics_ptr, layer, head, o_d, scale_log2, H=H, D=D)
        b_max, b_sum, b_weight, b_out = narrow_sums(BLOCK_M, BLOCK_N, BLOCK_D)
        ones = ones_of(scale_log2, stored)
    begin, end = _part_of(
        path_begin, path_end, first_unit, num_own, share, shares, addresses_ptr, H=H, BLOCK_N=BLOCK_N, BITS=OF_SPANS
    )
    first_token = tl.load(at.int32s_at(addresses_ptr, at.TILE_INDEX) + i_tile) * BLOCK_M // G
    # One loop nest for spans and own tokens: with two, ptxas serialises the tensor-core instructions of both.
    for j in range(path_begin, path_end + 1):  # spans, then the own tokens
        num_kv, address = _run_of(j, path_end, first_unit, num_own, own_address, addresses_ptr, H=H, BITS=OF_SPANS)
        is_own = (j >= path_end).to(tl.int32)
        stride, shift = _rows_of(is_own, layer, head, num_token_slots, H=H, D=D)
        to_key = tl.minimum(end - passed, num_kv)
        all_from = 0
        all_to = tl.minimum(to_key, tl.where(is_own > 0, num_before + 1 + first_token, num_kv))
        if visible_ptr is not None:
            all_to = tl.where(is_own > 0, num_before, all_to)
        if WINDOWED:
            position_ptr, is_cut, to_key = _hide_keys(j, is_own, address, num_kv, to_key, hidden, m_m, addresses_ptr)
            from_key = tl.where(is_own > 0, num_before + depth + 1 - window, 0)
            all_from = tl.where(is_cut, to_key, tl.max(tl.where(m_m, from_key, 0), 0))
        index_ptr = address.to(tl.pointer_type(tl.int32))
        # It begins at a difference of two numbers: a single one that shrinks from run to run is compiled wrongly
        # (Triton 3.6 to 3.8 keep its first value; seen on an H200).
        for start in range(tl.maximum(begin - passed, 0), to_key, BLOCK_N):
            n = start + tl.arange(0, BLOCK_N)
            # Behind the last key that one is read again, so that no copy needs a mask.
            slot = tl.load(index_ptr + tl.minimum(n, to_key - 1))
            if BITS < 16:
                s = score_narrow_block(b_q, b_zero, k_ptr, k_steps_ptr, slot, ones, D=D)
            else:
                row = (slot * stride).to(tl.int64) * D
                s, b_v = _score_block(b_q, b_rot, k_ptr + shift, v_ptr + shift, row, o_d, D, DV, BLOCK_D, BLOCK_ROT)
            # Masks cost several instructions a score; most blocks are seen whole by all rows of the tile.
            if (start + BLOCK_N > all_to) | (start < all_from):
                limit = tl.minimum(tl.where(is_own > 0, num_before + token + 1, num_kv), to_key)
                seen = hide_branches(n[None, :] < limit[:, None], visible_ptr, visible, n - num_before, is_own == 0)
                if WINDOWED:
                    b_position = tl.load(position_ptr + n, mask=(n < to_key) & is_cut, other=2147483647)
                    seen = seen & (n[None, :] >= from_key[:, None]) & (b_position[None, :] > hidden[:, None])
                s = tl.where(seen, s, float("-inf"))
            if BITS < 16:
                b_max, b_sum, b_weight, b_out = add_narrow_block(
                    b_max, b_sum, b_weight, b_out, s, v_ptr, v_steps_ptr, slot, ones, b_q.dtype, D=D
                )
            else:
                b_max, b_sum, b_out = _add_block(b_max, b_sum, b_out, s, b_v, scale_log2)
        passed += num_kv
    if BITS < 16:
        b_max += b_offset
        b_sum = tl.sum(b_sum, 1)
        b_weight = tl.max(b_weight, 1)
        b_out = with_values(b_out, b_weight, b_sum, statistics_ptr, layer, head, o_d, stored, H=H, D=D)
    # Read again: the numbers of the rows would take registers from the products.
    tile = tl.load(at.int32s_at(addresses_ptr, at.TILE_INDEX) + i_tile, volatile=True)
    i_row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    m_m = i_row < count * G
    if sink_logits_ptr is not None:  # only the first part counts it
        b_max, b_sum, b_out = _add_sink(b_max, b_sum, b_out, sink_logits_ptr + head * G + i_row % G, m_m & (split == 0))
    _store_part(
        out_ptr, lse_ptr, addresses_ptr, request, head, first, count, i_row, split, num_splits, b_max, b_sum, b_out,
        v_scale, o_d, m_m, H=H, G=G, DV=DV,
    )  # fmt: skip


@triton.jit
def _combine_kernel(
    addresses_ptr,
    out_ptr,  # [N, H * G, DV]
    lse_ptr,  # [N, H * G] float32, natural
    v_scale,
    H: tl.constexpr,
    G: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Merge the parts of some rows of a tile, in order, by the program of the tile's first part."""
    request = tl.load(at.int32s_at(addresses_ptr, at.TILE_REQUEST) + tl.program_id(0))
    split = tl.load(at.int32s_at(addresses_ptr, at.TILE_SPLIT) + tl.program_id(0))
    tile = tl.load(at.int32s_at(addresses_ptr, at.TILE_INDEX) + tl.program_id(0))
    num_splits = tl.load(at.int32s_at(addresses_ptr, at.NUM_SPLITS) + request)
    count = tl.load(at.int32s_at(addresses_ptr, at.NEW_LENS_DEVICE) + request) * G
    begin = tile * BLOCK_M + tl.program_id(2) * ROWS
    if (num_splits > 1) & (split == 0) & (begin < count):
        partial_out_ptr = at.floats_at(addresses_ptr, at.PARTIAL_OUT)
        partial_lse_ptr = at.floats_at(addresses_ptr, at.PARTIAL_LSE)
        head = tl.program_id(1)
        i_row = begin + tl.arange(0, ROWS)
        m_m = i_row < count
        o_d = tl.arange(0, BLOCK_D)
        m_out = m_m[:, None] & (o_d < DV)[None, :]
        b_max = tl.full([ROWS], float("-inf"), dtype=tl.float32)
        b_sum = tl.zeros([ROWS], dtype=tl.float32)
        b_out = tl.zeros([ROWS, BLOCK_D], dtype=tl.float32)
        first_partial = tl.load(at.int64s_at(addresses_ptr, at.EXTEND_PARTIAL) + request)
        # In order, so that sums have the same bits in every run.
        for part in range(num_splits):
            row = first_partial + (part * H + head).to(tl.int64) * count + i_row
            b_lse = tl.load(partial_lse_ptr + row, mask=m_m, other=float("-inf"))
            b_part = tl.load(partial_out_ptr + row[:, None] * DV + o_d[None, :], mask=m_out, other=0.0)
            new_max = tl.maximum(b_max, b_lse)
            base = tl.where(new_max == float("-inf"), 0.0, new_max)
            weight = tl.exp2(b_lse - base)
            decay = tl.exp2(b_max - base)
            b_sum = b_sum * decay + weight
            b_out = b_out * decay[:, None] + b_part * weight[:, None]
            b_max = new_max
        first = _first_row(request, addresses_ptr)
        row = (first + i_row // G) * (H * G) + head * G + i_row % G
        divisor = tl.where(b_sum > 0.0, b_sum, 1.0)
        tl.store(out_ptr + row[:, None] * DV + o_d[None, :], b_out / divisor[:, None] * v_scale, mask=m_out)
        tl.store(lse_ptr + row, (b_max + tl.log2(divisor)) * 0.6931471805599453, mask=m_m)


def run_extend(addresses: TableAddresses, step: Step, inputs: LayerInputs, out: Tensor, lse: Tensor) -> None:
    """Attend with the requests of more than 128 q rows per KV head: a launch per width of rows, and one that merges."""
    q, head_dim = inputs.q, inputs.q.shape[2]
    tables, sizes = addresses.tables, addresses.tables.sizes
    has_window, has_few_bits = inputs.window > 0, inputs.coding is not None
    tile = tiles_for(limits_of(q.device), head_dim, has_window=has_window, has_few_bits=has_few_bits)[EXTEND]
    constants = {"H": sizes.num_kv_heads, "G": sizes.group_size, "BLOCK_M": tile.rows}
    widths = block_widths(head_dim, inputs.v_head_dim)
    first_tile = 0
    for bits, count in tables.tile_counts.items():
        if count:
            _extend_kernel[(count, sizes.num_kv_heads)](
                *(addresses.on_device, q, inputs.k_arena, inputs.v_arena, *inputs.steps, inputs.sink_logits, out, lse),
                *(step.seq_lens, step.pool_rows, step.visible, inputs.statistics, step.req_to_token.data_ptr()),
                *(inputs.layer, step.req_to_token.stride(0), inputs.k_arena.shape[1], q.stride(0)),
                *(inputs.sm_scale * LOG2_E, inputs.v_scale, inputs.window, first_tile),
                WINDOWED=has_window,
                BLOCK_N=tile.keys if bits == WIDTHS[0] else narrow_keys(tile),
                BITS=bits,
                UPCAST=not q.is_cuda,
                num_stages=tile.stages,
                num_warps=tile.warps,
                **widths,
                **constants,
            )
        first_tile += count
    if tables.has_splits:
        grid = (tables.tile_request.numel(), sizes.num_kv_heads, triton.cdiv(tile.rows, COMBINE_ROWS))
        constants |= {"ROWS": COMBINE_ROWS, "DV": widths["DV"], "BLOCK_D": widths["BLOCK_D"]}
        _combine_kernel[grid](addresses.on_device, out, lse, inputs.v_scale, **constants)
