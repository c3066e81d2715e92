"""Runs, partials and work items of a batch's spans, for all layers: two launches per batch, or three.

First, one program per layer scans the units in (span, KV head) order; then one program per (layer, span) writes the
list of its work items.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvevict_kernels.ragged_decode.tables import Tables
from kvevict_kernels.ragged_decode.triton_items import store_items

UNIT_BLOCK = 256
FILL_BLOCK = 128


@triton.jit
def run_chunk(length, chunk, cap):
    """Entries per work item of a run: longer where the run would have more than ``cap`` items."""
    return chunk * tl.maximum(tl.cdiv(length, chunk * cap), 1)


@triton.jit(
    do_not_specialize=["num_spans"],
    do_not_specialize_on_alignment=[
        *("span_address_ptr", "span_starts_ptr", "span_lens_ptr", "span_members_ptr", "span_class_ptr"),
        *("span_chunk_ptr", "span_cap_ptr", "run_address_ptr", "run_lens_ptr", "run_chunks_ptr", "partial_start_ptr"),
        *("item_start_0_ptr", "item_start_1_ptr", "item_count_0_ptr", "item_count_1_ptr"),
    ],
)
def _runs_kernel(
    span_address_ptr,  # [S] int64
    span_starts_ptr,  # [S] int64, addresses of [L, H] int32
    span_lens_ptr,  # likewise
    span_members_ptr,  # [S] int32
    span_class_ptr,
    span_chunk_ptr,
    span_cap_ptr,
    run_address_ptr,  # [L, S, H] int64
    run_lens_ptr,  # [L, S, H] int32
    run_chunks_ptr,
    partial_start_ptr,  # [L, S, H] int64
    item_start_0_ptr,  # [L, S * H] int32
    item_start_1_ptr,
    item_count_0_ptr,  # [L] int32
    item_count_1_ptr,
    num_spans,
    H: tl.constexpr,
    G: tl.constexpr,
    ROWS_0: tl.constexpr,
    ROWS_1: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Address, length and chunks of every run of a layer, and the prefix sums of partials and work items."""
    layer = tl.program_id(0)
    num_units = num_spans * H
    first_unit = layer.to(tl.int64) * num_units
    partials = tl.zeros([], dtype=tl.int64)
    items_0 = tl.zeros([], dtype=tl.int32)
    items_1 = tl.zeros([], dtype=tl.int32)
    # One program scans a layer: prefix sums over several programs would take another launch.
    for begin in range(0, num_units, BLOCK):
        unit = begin + tl.arange(0, BLOCK)
        mask = unit < num_units
        span = unit // H
        place = layer * H + unit % H
        lens_ptr = tl.load(span_lens_ptr + span, mask=mask, other=0).to(tl.pointer_type(tl.int32))
        length = tl.load(lens_ptr + place, mask=mask, other=0)
        starts_ptr = tl.load(span_starts_ptr + span, mask=mask, other=0).to(tl.pointer_type(tl.int32))
        start = tl.load(starts_ptr + place, mask=mask, other=0)
        address = tl.load(span_address_ptr + span, mask=mask, other=0) + start.to(tl.int64) * 4
        rows = tl.load(span_members_ptr + span, mask=mask, other=0) * G
        cap = tl.load(span_cap_ptr + span, mask=mask, other=1)
        chunks = tl.cdiv(length, run_chunk(length, tl.load(span_chunk_ptr + span, mask=mask, other=1), cap))
        which = tl.load(span_class_ptr + span, mask=mask, other=0)
        tl.store(run_address_ptr + first_unit + unit, address, mask=mask)
        tl.store(run_lens_ptr + first_unit + unit, length, mask=mask)
        tl.store(run_chunks_ptr + first_unit + unit, chunks, mask=mask)
        used = chunks.to(tl.int64) * rows
        tl.store(partial_start_ptr + first_unit + unit, partials + tl.cumsum(used, 0) - used, mask=mask)
        partials += tl.sum(used, 0)
        mine = tl.where(which == 0, chunks * tl.cdiv(rows, ROWS_0), 0)
        tl.store(item_start_0_ptr + first_unit + unit, items_0 + tl.cumsum(mine, 0) - mine, mask=mask)
        items_0 += tl.sum(mine, 0)
        mine = tl.where(which == 1, chunks * tl.cdiv(rows, ROWS_1), 0)
        tl.store(item_start_1_ptr + first_unit + unit, items_1 + tl.cumsum(mine, 0) - mine, mask=mask)
        items_1 += tl.sum(mine, 0)
    tl.store(item_count_0_ptr + layer, items_0)
    tl.store(item_count_1_ptr + layer, items_1)


@triton.jit(
    do_not_specialize=["max_items", "num_spans", "which"],
    do_not_specialize_on_alignment=[
        *("span_class_ptr", "span_members_ptr", "span_member_start_ptr", "span_chunk_ptr", "span_cap_ptr"),
        *("span_bits_ptr", "run_address_ptr", "run_lens_ptr", "partial_start_ptr", "item_start_ptr", "items_ptr"),
    ],
)
def _work_kernel(
    span_class_ptr,  # [S] int32
    span_members_ptr,
    span_member_start_ptr,
    span_chunk_ptr,
    span_cap_ptr,
    span_bits_ptr,
    run_address_ptr,  # [L, S * H] int64
    run_lens_ptr,  # [L, S * H] int32
    partial_start_ptr,  # [L, S * H] int64
    item_start_ptr,  # [L, S * H] int32
    items_ptr,  # [L, max_items, ITEM_WORDS] int64
    max_items,
    num_spans,
    which,
    row_tile,
    H: tl.constexpr,
    G: tl.constexpr,
    FILL: tl.constexpr,
):
    """Write the work items of a span that is in the class."""
    layer = tl.program_id(0)
    span = tl.program_id(1)
    first_unit = layer.to(tl.int64) * (num_spans * H) + span * H
    if tl.load(span_class_ptr + span) == which:
        count = tl.load(span_members_ptr + span)
        member = tl.load(span_member_start_ptr + span)
        bits = tl.load(span_bits_ptr + span)
        tiles = tl.cdiv(count * G, row_tile)
        for head in range(H):
            unit = first_unit + head
            length = tl.load(run_lens_ptr + unit)
            chunk = run_chunk(length, tl.load(span_chunk_ptr + span), tl.load(span_cap_ptr + span))
            start = layer.to(tl.int64) * max_items + tl.load(item_start_ptr + unit)
            num_items = tl.cdiv(length, chunk) * tiles
            for begin in range(0, num_items, FILL):
                o = begin + tl.arange(0, FILL)
                first_key = o // tiles * chunk
                address = tl.load(run_address_ptr + unit) + first_key.to(tl.int64) * 4
                partial = tl.load(partial_start_ptr + unit) + (o // tiles).to(tl.int64) * (count * G)
                store_items(
                    items_ptr, start + o, o < num_items, address, tl.minimum(length - first_key, chunk), member, count,
                    bits, o % tiles * H + head, partial, span,
                )  # fmt: skip


def lay_out(tables: Tables) -> None:
    """Fill in the tables that :func:`kvevict_kernels.ragged_decode.launch.plan_batch` left empty."""
    sizes, classes = tables.sizes, tables.classes
    _runs_kernel[(sizes.num_layers,)](
        *(tables.span_address, tables.span_starts, tables.span_lens, tables.span_members, tables.span_class),
        *(tables.span_chunk, tables.span_cap, tables.run_address, tables.run_lens, tables.run_chunks),
        *(tables.partial_start, classes[0].item_start, classes[1].item_start),
        *(classes[0].item_count, classes[1].item_count, tables.num_spans),
        H=sizes.num_kv_heads,
        G=sizes.group_size,
        ROWS_0=sizes.decode_rows[0],
        ROWS_1=sizes.decode_rows[1],
        BLOCK=UNIT_BLOCK,
    )
    for which, work in enumerate(classes):
        if work.max_items:
            _work_kernel[(sizes.num_layers, tables.num_spans)](
                *(tables.span_class, tables.span_members, tables.span_member_start, tables.span_chunk),
                *(tables.span_cap, tables.span_bits, tables.run_address, tables.run_lens, tables.partial_start),
                *(work.item_start, work.items, work.max_items, tables.num_spans, which, sizes.decode_rows[which]),
                H=sizes.num_kv_heads,
                G=sizes.group_size,
                FILL=FILL_BLOCK,
            )
