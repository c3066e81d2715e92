"""Work items of the split kernel: one chunk of a span's run or of a suffix, times one tile of its readers' q rows."""

from __future__ import annotations

import triton
import triton.language as tl

from kvevict_kernels.ragged_decode import triton_addresses as at
from kvevict_kernels.ragged_decode.triton_layout import run_chunk
from kvevict_kernels.ragged_decode.triton_merge import suffix_chunk

STEP_LISTS = (
    *("seq_lens_ptr", "pool_rows_ptr", "suffix_work_ptr", "suffix_work_start_ptr"),
    *("work_ptr", "work_start_ptr", "visible_ptr"),
)
"""Not specialised on alignment: these may be slices of SGLang's buffers, whose alignment varies."""


@triton.jit(do_not_specialize=["num_requests"], do_not_specialize_on_alignment=list(STEP_LISTS))
def suffix_work_kernel(
    addresses_ptr,
    seq_lens_ptr,  # [B] int32
    work_ptr,  # [bound] int32
    work_start_ptr,  # [num_requests + 1] int32
    num_requests,  # of the class
    CLASS: tl.constexpr,
    LEAST: tl.constexpr,
    ROW_TILE: tl.constexpr,
    NUM_ITEMS: tl.constexpr,
    STEP: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    BLOCK: tl.constexpr,
    FILL: tl.constexpr,
):
    """Each program counts the items of all requests before its own, then writes its own."""
    mine = tl.program_id(0)
    start = tl.zeros([], dtype=tl.int32)
    count = tl.zeros([], dtype=tl.int32)
    for first in range(0, mine + 1, BLOCK):
        i = first + tl.arange(0, BLOCK)
        mask = i <= mine
        request = tl.load(at.class_int32s_at(addresses_ptr, at.REQUESTS, CLASS) + i, mask=mask, other=0)
        waterline = tl.load(at.int32s_at(addresses_ptr, at.WATERLINES) + request, mask=mask, other=0)
        length = tl.load(seq_lens_ptr + request, mask=mask, other=0) - waterline
        tiles = tl.cdiv(
            tl.load(at.int32s_at(addresses_ptr, at.NEW_LENS_DEVICE) + request, mask=mask, other=0) * G, ROW_TILE
        )
        chunk = suffix_chunk(length, LEAST, H=H, NUM_ITEMS=NUM_ITEMS, STEP=STEP)
        items = tl.where(mask, tl.cdiv(length, chunk) * tiles * H, 0)
        start += tl.sum(tl.where(i < mine, items, 0), 0)
        count += tl.sum(tl.where(i == mine, items, 0), 0)
    tl.store(work_start_ptr + mine, start)
    if mine == num_requests - 1:
        tl.store(work_start_ptr + num_requests, start + count)
    for begin in range(0, count, FILL):
        o = begin + tl.arange(0, FILL)
        tl.store(work_ptr + start + o, o * 0 + mine, mask=o < count)


@triton.jit
def span_item(
    work, layer, addresses_ptr,
    CLASS: tl.constexpr, H: tl.constexpr, G: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """One chunk of a run, for one tile of its readers' q rows."""
    of_layer = layer * at.max_items_of(addresses_ptr, CLASS)
    unit = tl.load(at.class_int32s_at(addresses_ptr, at.WORK_UNIT, CLASS) + of_layer + work)
    first_unit = layer * tl.load(addresses_ptr + at.NUM_SPANS) * H
    span = unit // H
    local = work - tl.load(at.class_int32s_at(addresses_ptr, at.ITEM_START, CLASS) + first_unit + unit)
    count = tl.load(at.int32s_at(addresses_ptr, at.SPAN_MEMBERS) + span)
    tiles = tl.cdiv(count * G, BLOCK_M)
    length = tl.load(at.int32s_at(addresses_ptr, at.RUN_LENS) + first_unit + unit)
    chunk = tl.load(at.int32s_at(addresses_ptr, at.SPAN_CHUNK) + span)
    chunk = run_chunk(length, chunk, tl.load(at.int32s_at(addresses_ptr, at.SPAN_CAP) + span))
    begin = local // tiles * chunk
    index_address = tl.load(at.int64s_at(addresses_ptr, at.RUN_ADDRESS) + first_unit + unit) + begin.to(tl.int64) * 4
    partial = tl.load(at.int64s_at(addresses_ptr, at.PARTIAL_START) + first_unit + unit)
    partial += (local // tiles).to(tl.int64) * (count * G)
    member = tl.load(at.int32s_at(addresses_ptr, at.SPAN_MEMBER_START) + span)
    return (
        unit % H,
        count,
        member,
        local % tiles,
        length,
        begin,
        tl.minimum(length - begin, chunk),
        index_address,
        partial,
    )


@triton.jit
def suffix_item(
    item, addresses_ptr, seq_lens_ptr, pool_rows_ptr, suffix_work_ptr, suffix_work_start_ptr, req_to_token, row_stride,
    CLASS: tl.constexpr, LEAST: tl.constexpr, NUM_ITEMS: tl.constexpr, STEP: tl.constexpr,
    H: tl.constexpr, G: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """One chunk of a request's own tokens, for one tile of its q rows."""
    place = tl.load(suffix_work_ptr + item)
    request = tl.load(at.class_int32s_at(addresses_ptr, at.REQUESTS, CLASS) + place)
    local = item - tl.load(suffix_work_start_ptr + place)
    count = tl.load(at.int32s_at(addresses_ptr, at.NEW_LENS_DEVICE) + request)
    tiles = tl.cdiv(count * G, BLOCK_M)
    waterline = tl.load(at.int32s_at(addresses_ptr, at.WATERLINES) + request)
    length = tl.load(seq_lens_ptr + request) - waterline
    chunk = suffix_chunk(length, LEAST, H=H, NUM_ITEMS=NUM_ITEMS, STEP=STEP)
    split = local // (H * tiles)
    begin = split * chunk
    index_address = req_to_token + (tl.load(pool_rows_ptr + request) * row_stride + waterline + begin) * 4
    partial = tl.load(at.int64s_at(addresses_ptr, at.SUFFIX_PARTIAL) + request)
    partial += (split * H + local % H).to(tl.int64) * (count * G)
    member = tl.load(at.int32s_at(addresses_ptr, at.REQUEST_MEMBERS) + request)
    tile = local // H % tiles
    return local % H, count, member, tile, length, begin, tl.minimum(length - begin, chunk), index_address, partial


@triton.jit
def span_window(item, is_suffix, layer, addresses_ptr, CLASS: tl.constexpr, H: tl.constexpr):
    """Bytes from an entry's head slot to its position; 0 for suffixes."""
    of_layer = layer * at.max_items_of(addresses_ptr, CLASS)
    is_span = is_suffix == 0
    unit = tl.load(at.class_int32s_at(addresses_ptr, at.WORK_UNIT, CLASS) + of_layer + item, mask=is_span, other=0)
    return tl.load(at.int64s_at(addresses_ptr, at.SPAN_POSITIONS) + unit // H, mask=is_span, other=0)
