"""Work items of the split kernel: one chunk of a span's run or of a suffix, times one tile of its readers' q rows.

An item is 32 bytes that a program reads at once: what it needs before its first key is one load away.

=====  ==================================  =====================================================================
word   bits 0 to 31                        bits 32 to 63
=====  ==================================  =====================================================================
0      address of the chunk's first index  (64 bits)
1      keys of the chunk                   first of its readers' rows in ``Tables.members``
2      readers (new tokens), bits of rows  tile of q rows * H + KV head
3      first partial row                   a span: its number; a suffix: keys from the chunk's first to the last one
=====  ==================================  =====================================================================

Partial rows fit 32 bits: as many of them would take more memory than a device has. Readers take 26 bits of theirs; the
others hold the 16 or 4 that a row of a span has, or 16 in a suffix.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvevict_kernels.ragged_decode import triton_addresses as at
from kvevict_kernels.ragged_decode.tables import ITEM_WORDS

STEP_LISTS = (
    *("seq_lens_ptr", "pool_rows_ptr", "suffix_items_ptr", "suffix_start_ptr"),
    *("items_ptr", "start_ptr", "visible_ptr"),
)
"""Not specialised on alignment: these may be slices of SGLang's buffers, whose alignment varies."""
_WORDS = tl.constexpr(ITEM_WORDS)
_READERS = tl.constexpr(1 << 26)


@triton.jit
def suffix_chunk(length, least, H: tl.constexpr, NUM_ITEMS: tl.constexpr, STEP: tl.constexpr):
    """Tokens per chunk of a suffix, from its length alone; NUM_ITEMS chunks fill the device."""
    return tl.maximum(tl.cdiv(tl.cdiv(length * H, NUM_ITEMS), STEP) * STEP, least)


@triton.jit
def _pack(low, high):
    """Two numbers >= 0 of 32 bits in one word."""
    return (high.to(tl.int64) << 32) | low.to(tl.int64)


@triton.jit
def store_items(items_ptr, o, mask, index_address, num_keys, member, count, bits, place, partial, last):
    """Write the items ``o`` [BLOCK] of a list; the arguments are the fields above, numbers or [BLOCK]."""
    p_item = items_ptr + o.to(tl.int64) * _WORDS
    zero = o * 0
    tl.store(p_item, index_address + zero, mask=mask)
    tl.store(p_item + 1, _pack(num_keys + zero, member + zero), mask=mask)
    tl.store(p_item + 2, _pack(count + zero + bits * _READERS, place + zero), mask=mask)
    tl.store(p_item + 3, _pack(partial.to(tl.int32) + zero, last + zero), mask=mask)


@triton.jit
def load_item(item, num_suffix_items, suffix_items_ptr, layer, addresses_ptr, CLASS: tl.constexpr):
    """The words of an item: those of suffixes are first, then the layer's; zeros or anything behind the last one."""
    max_items = at.max_items_of(addresses_ptr, CLASS)
    of_layer = layer * max_items + item - num_suffix_items
    p_span = at.class_int64s_at(addresses_ptr, at.ITEMS, CLASS) + of_layer * _WORDS
    p_item = tl.where(item < num_suffix_items, suffix_items_ptr + item.to(tl.int64) * _WORDS, p_span)
    mask = item < num_suffix_items + max_items
    return (
        tl.load(p_item, mask=mask, other=0),
        tl.load(p_item + 1, mask=mask, other=0),
        tl.load(p_item + 2, mask=mask, other=0),
        tl.load(p_item + 3, mask=mask, other=0),
    )


@triton.jit
def low_of(word):
    """Bits 0 to 31."""
    return word.to(tl.int32)


@triton.jit
def readers_of(word):
    """Readers of an item, from its third word."""
    return low_of(word) % _READERS


@triton.jit
def bits_of(word):
    """Bits of an item's rows, from its third word."""
    return low_of(word) // _READERS


@triton.jit
def high_of(word):
    """Bits 32 to 63."""
    return (word >> 32).to(tl.int32)


@triton.jit(
    do_not_specialize=["num_requests", "req_to_token", "row_stride"], do_not_specialize_on_alignment=list(STEP_LISTS)
)
def suffix_work_kernel(
    addresses_ptr,
    seq_lens_ptr,  # [B] int32
    pool_rows_ptr,  # [B] int64
    items_ptr,  # [bound, ITEM_WORDS] int64
    start_ptr,  # [num_requests + 1] int32
    num_requests,  # of the class
    req_to_token,  # address of [rows, row_stride] int32
    row_stride,
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
    num_items = tl.zeros([], dtype=tl.int32)
    # Each program counts the items of all before it, so that none waits for another and one launch is enough.
    for first in range(0, mine + 1, BLOCK):
        i = first + tl.arange(0, BLOCK)
        mask = i <= mine
        request = tl.load(at.class_int32s_at(addresses_ptr, at.REQUESTS, CLASS) + i, mask=mask, other=0)
        compressed_len = tl.load(at.int32s_at(addresses_ptr, at.COMPRESSED_LENS) + request, mask=mask, other=0)
        length = tl.load(seq_lens_ptr + request, mask=mask, other=0) - compressed_len
        tiles = tl.cdiv(
            tl.load(at.int32s_at(addresses_ptr, at.NEW_LENS_DEVICE) + request, mask=mask, other=0) * G, ROW_TILE
        )
        chunk = suffix_chunk(length, LEAST, H=H, NUM_ITEMS=NUM_ITEMS, STEP=STEP)
        items = tl.where(mask, tl.cdiv(length, chunk) * tiles * H, 0)
        start += tl.sum(tl.where(i < mine, items, 0), 0)
        num_items += tl.sum(tl.where(i == mine, items, 0), 0)
    tl.store(start_ptr + mine, start)
    if mine == num_requests - 1:
        tl.store(start_ptr + num_requests, start + num_items)
    request = tl.load(at.class_int32s_at(addresses_ptr, at.REQUESTS, CLASS) + mine)
    count = tl.load(at.int32s_at(addresses_ptr, at.NEW_LENS_DEVICE) + request)
    tiles = tl.cdiv(count * G, ROW_TILE)
    compressed_len = tl.load(at.int32s_at(addresses_ptr, at.COMPRESSED_LENS) + request)
    length = tl.load(seq_lens_ptr + request) - compressed_len
    chunk = suffix_chunk(length, LEAST, H=H, NUM_ITEMS=NUM_ITEMS, STEP=STEP)
    index_address = req_to_token + (tl.load(pool_rows_ptr + request) * row_stride + compressed_len) * 4
    first_partial = tl.load(at.int64s_at(addresses_ptr, at.SUFFIX_PARTIAL) + request)
    member = tl.load(at.int32s_at(addresses_ptr, at.REQUEST_MEMBERS) + request)
    for begin in range(0, num_items, FILL):
        o = begin + tl.arange(0, FILL)
        split = o // (H * tiles)
        first_key = split * chunk
        partial = first_partial + (split * H + o % H).to(tl.int64) * (count * G)
        last = length - first_key
        store_items(
            items_ptr, start + o, o < num_items, index_address + first_key.to(tl.int64) * 4, tl.minimum(last, chunk),
            member, count, 16, o % (H * tiles), partial, last,
        )  # fmt: skip
