"""ragged_decode on the device: split-KV over a work list of spans and suffixes, then one merge.

A work item is one chunk of a unit's keys times one tile of its q rows. Programs loop over the items of a layer with a
stride, so uneven runs balance; the number of items is read on the device. A chunk's size depends on its own span or
suffix only (chunks.py): a row's result depends neither on the grid nor on other requests. Partials are float32, their
log-sum-exps have base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from kvevict_kernels.checks import FP8
from kvevict_kernels.device_limits import dependent_launch, limits_of
from kvevict_kernels.ragged_decode import chunks
from kvevict_kernels.ragged_decode import triton_addresses as at
from kvevict_kernels.ragged_decode.addresses import TableAddresses
from kvevict_kernels.ragged_decode.host_lists import NUM_CLASSES
from kvevict_kernels.ragged_decode.tables import LayerInputs, Step
from kvevict_kernels.ragged_decode.tile_table import Tile, block_widths, narrow_keys, tiles_for
from kvevict_kernels.ragged_decode.triton_block import (
    LOG2_E,
    add_narrow_block,
    attend_block,
    hidden_keys,
    hide_branches,
    load_queries,
    load_tree,
    narrow_sums,
    score_narrow_block,
)
from kvevict_kernels.ragged_decode.triton_items import (
    STEP_LISTS,
    bits_of,
    high_of,
    load_item,
    low_of,
    readers_of,
    suffix_work_kernel,
)
from kvevict_kernels.ragged_decode.triton_merge import run_merge
from kvevict_kernels.triton_rows import head_slot_of, ones_of, turned_queries, with_values

INTERPRETER_PROGRAMS = 3
REQUEST_BLOCK = 128


@triton.jit
def _store_partials(addresses_ptr, row, b_max, b_sum, b_out, o_d, m_m, DV: tl.constexpr):
    """Write rows [BLOCK_M] of partial outputs and their log-sum-exps."""
    # A row may have seen no key of this item: its log-sum-exp is -inf then, and its output 0 instead of NaN.
    divisor = tl.where(b_sum > 0.0, b_sum, 1.0)
    p_out = at.floats_at(addresses_ptr, at.PARTIAL_OUT) + row[:, None] * DV + o_d[None, :]
    tl.store(p_out, b_out / divisor[:, None], mask=m_m[:, None] & (o_d < DV)[None, :])
    tl.store(at.floats_at(addresses_ptr, at.PARTIAL_LSE) + row, b_max + tl.log2(divisor), mask=m_m)


@triton.jit
def _last_hidden(
    member, token, reader, depth, m_m, window, visible_ptr, seq_lens_ptr, addresses_ptr,
):  # fmt: skip
    """[BLOCK_M], the last position that each reader of a span does not see in a layer with a window."""
    request = tl.load(at.int32s_at(addresses_ptr, at.MEMBER_REQUEST) + member + token, mask=m_m, other=0)
    left = tl.load(at.int32s_at(addresses_ptr, at.ROW_ENDS) + request, mask=m_m, other=0) - reader
    if visible_ptr is not None:
        left = tl.load(at.int32s_at(addresses_ptr, at.NEW_LENS_DEVICE) + request, mask=m_m, other=0) - depth
    return tl.load(seq_lens_ptr + request, mask=m_m, other=0) - left - window


@triton.jit
def _attend_keys(
    b_q,  # [BLOCK_M, BLOCK_D]
    b_rot,  # of latents
    k_ptr,
    v_ptr,
    index_ptr,  # of the item's keys
    position_ptr,  # likewise, of a span; read if WINDOWED
    visible_ptr,
    visible,  # [BLOCK_M]
    from_block,
    num_kv,
    first_key,  # that some row sees; read if WINDOWED
    from_key,  # [BLOCK_M], first one that each row sees; read if WINDOWED
    limit,  # [BLOCK_M], keys that each row sees
    hidden,  # [BLOCK_M], last position that each row does not see; read if WINDOWED
    is_cut,  # whether some row does not see all of a span; read if WINDOWED
    is_suffix,
    slot_scale,
    slot_shift,
    to_new,  # from a key's place to its place among the new tokens
    o_d,
    scale_log2,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_ROT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """Attend to the keys of an item; maxima (base 2), sums of weights, and weighted sums of values."""
    BLOCK_M: tl.constexpr = b_q.shape[0]
    b_max, b_sum = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32), tl.zeros([BLOCK_M], dtype=tl.float32)
    b_out = tl.zeros([BLOCK_M, o_d.shape[0]], dtype=tl.float32)
    for start in range(from_block, num_kv, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        m_n = n < num_kv
        # Before the window, rows of a window pool may hold other requests' slots: no index is read there.
        index = tl.maximum(n, first_key) if WINDOWED else n
        row = tl.load(index_ptr + index, mask=m_n, other=0).to(tl.int64) * slot_scale + slot_shift
        seen = hide_branches(n[None, :] < limit[:, None], visible_ptr, visible, n + to_new, is_suffix == 0)
        if WINDOWED:
            b_position = tl.load(position_ptr + n, mask=m_n & is_cut, other=2147483647)
            seen = seen & (n[None, :] >= from_key[:, None]) & (b_position[None, :] > hidden[:, None])
        b_max, b_sum, b_out = attend_block(
            b_q, b_rot, b_max, b_sum, b_out, k_ptr, v_ptr, row, m_n, seen, o_d, scale_log2,
            D=D, DV=DV, BLOCK_ROT=BLOCK_ROT,
        )  # fmt: skip
    return b_max, b_sum, b_out


@triton.jit
def _attend_narrow_keys(
    b_q,  # [BLOCK_M, BLOCK_D] turned
    b_zero,  # [BLOCK_M] what products begin with
    k_ptr,
    v_ptr,
    k_steps_ptr,
    v_steps_ptr,
    index_ptr,  # of the item's keys
    position_ptr,  # likewise; read if WINDOWED
    num_kv,
    hidden,  # [BLOCK_M], last position that each row does not see; read if WINDOWED
    is_cut,  # whether some row does not see all keys; read if WINDOWED
    scale_log2,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """The same of a span's rows of 4 bits, which every new token sees; also sums of weights times steps of values.

    :func:`kvevict_kernels.triton_rows.with_values` makes values of the sums.
    """
    BLOCK_M: tl.constexpr = b_q.shape[0]
    b_max, b_sum, b_weight, b_out = narrow_sums(BLOCK_M, BLOCK_N, b_q.shape[1])
    ones = ones_of(scale_log2, k_ptr.dtype.element_ty)
    for start in range(0, num_kv, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        number = tl.load(index_ptr + tl.minimum(n, num_kv - 1))  # the last one again: no copy needs a mask
        bias = tl.where(tl.arange(0, BLOCK_N) < num_kv - start, 0.0, float("-inf"))[None, :]
        if WINDOWED:
            b_position = tl.load(position_ptr + n, mask=(n < num_kv) & is_cut, other=2147483647)
            bias = tl.where(b_position[None, :] > hidden[:, None], bias, float("-inf"))
        s = score_narrow_block(b_q, b_zero, k_ptr, k_steps_ptr, number, ones, D=D) + bias
        b_max, b_sum, b_weight, b_out = add_narrow_block(
            b_max, b_sum, b_weight, b_out, s, v_ptr, v_steps_ptr, number, ones, b_q.dtype, D=D
        )
    b_sum = tl.sum(b_sum, 1)
    return tl.where(b_sum > 0.0, b_max, float("-inf")), b_sum, tl.max(b_weight, 1), b_out


@triton.jit(
    do_not_specialize=["layer", "num_requests", "window"],
    do_not_specialize_on_alignment=list(STEP_LISTS),
)
def _split_kernel(
    addresses_ptr,
    q_ptr,  # [N, H * G, D], tokens q_stride elements apart
    k_ptr,  # [L, T, H, D]
    v_ptr,
    k_steps_ptr,  # [X] bfloat16, steps of rows of 4 bits; None: all rows have 16
    v_steps_ptr,
    seq_lens_ptr,
    suffix_items_ptr,  # [bound, ITEM_WORDS] int64
    suffix_start_ptr,  # [num_requests + 1] int32
    visible_ptr,  # [N] int64, or None
    statistics_ptr,  # [D + 4 * L * H, D] float32; None: all rows have 16 bits
    layer,
    num_requests,  # of the class
    num_token_slots,
    q_stride,
    scale_log2,
    window,  # tokens that a query sees; read if WINDOWED
    CLASS: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,  # columns of values; fewer than D: they are the first ones of the keys (latents)
    WINDOWED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NARROW_N: tl.constexpr,  # the same of rows of 4 bits
    BLOCK_D: tl.constexpr,  # at least DV
    BLOCK_ROT: tl.constexpr,  # at least D - DV; 0: not latents
    UPCAST: tl.constexpr,  # float32 products: the interpreter cannot multiply bfloat16
    PDL: tl.constexpr,  # the merge may start beside it
):
    """Write partials, float32, [num_partials, DV], and their log-sum-exps, base 2."""
    if PDL:
        gdc_launch_dependents()
    o_d, o_m = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_M)
    num_suffix_items = tl.load(suffix_start_ptr + num_requests)
    # The first item is read beside the number of items, not after it.
    index_address, keys, readers, last = load_item(
        tl.program_id(0), num_suffix_items, suffix_items_ptr, layer, addresses_ptr, CLASS=CLASS
    )
    num_items = num_suffix_items + tl.load(at.class_int32s_at(addresses_ptr, at.ITEM_COUNT, CLASS) + layer)
    # With a stride, so that uneven runs balance. Addresses are read again for every item: kept, they would take
    # registers from the products.
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        num_kv, member, count = low_of(keys), high_of(keys), readers_of(readers)
        head, i_row = high_of(readers) % H, high_of(readers) // H * BLOCK_M + o_m
        # Runs hold head slots; suffixes hold token slots, and are causal, or end in a tree.
        is_suffix = (item < num_suffix_items).to(tl.int32)
        slot_scale = 1 + is_suffix * (H - 1)
        slot_shift = is_suffix * head_slot_of(layer.to(tl.int64), 0, head, num_token_slots, H)
        m_m = i_row < count * G
        token = i_row // G
        reader = tl.load(at.int32s_at(addresses_ptr, at.MEMBERS) + member + token, mask=m_m, other=0)
        q_row = reader.to(tl.int64) * q_stride + (head * G + i_row % G) * D
        b_q, b_rot = load_queries(q_ptr, q_row, m_m, o_d, D=D, DV=DV, BLOCK_ROT=BLOCK_ROT, UPCAST=UPCAST)
        visible, depth = load_tree(visible_ptr, reader, token, m_m)
        to_last = tl.where(is_suffix > 0, high_of(last), num_kv)
        to_key = to_last - is_suffix * (count - 1 - token)
        limit = tl.minimum(to_key, num_kv)
        index_ptr = index_address.to(tl.pointer_type(tl.int32))
        from_block, first_key, from_key, hidden, is_cut, position_ptr = 0, 0, 0, 0, 0, index_ptr
        if WINDOWED:
            m_s = m_m & (is_suffix == 0)
            hidden = _last_hidden(member, token, reader, depth, m_s, window, visible_ptr, seq_lens_ptr, addresses_ptr)
            positions_ptr = at.int64s_at(addresses_ptr, at.SPAN_POSITIONS)
            to_positions = tl.load(positions_ptr + high_of(last), mask=is_suffix == 0, other=0)
            position_ptr = (index_address + to_positions).to(tl.pointer_type(tl.int32))
            is_hidden, is_cut = hidden_keys(position_ptr, num_kv, is_suffix == 0, hidden, m_m)
            num_kv = tl.where(is_hidden, 0, num_kv)
            # Positions of a suffix are consecutive, without a list.
            from_key = tl.where(is_suffix > 0, to_key + depth - token - window, 0)
            first_key = tl.maximum(tl.min(tl.where(m_m, from_key, 2147483647), 0), 0)
            from_block = first_key // BLOCK_N * BLOCK_N
        if statistics_ptr is None or bits_of(readers) == 16:
            b_max, b_sum, b_out = _attend_keys(
                b_q, b_rot, k_ptr, v_ptr, index_ptr, position_ptr, visible_ptr, visible, from_block, num_kv, first_key,
                from_key, limit, hidden, is_cut, is_suffix, slot_scale, slot_shift, count - to_last, o_d, scale_log2,
                D=D, DV=DV, BLOCK_ROT=BLOCK_ROT, BLOCK_N=BLOCK_N, WINDOWED=WINDOWED,
            )  # fmt: skip
        else:
            stored: tl.constexpr = k_ptr.dtype.element_ty
            b_turned, b_zero, b_offset = turned_queries(b_q, statistics_ptr, layer, head, o_d, scale_log2, H=H, D=D)
            b_max, b_sum, b_weight, b_out = _attend_narrow_keys(
                b_turned, b_zero, k_ptr, v_ptr, k_steps_ptr, v_steps_ptr, index_ptr, position_ptr, num_kv, hidden,
                is_cut, scale_log2, D=D, BLOCK_N=NARROW_N, WINDOWED=WINDOWED,
            )  # fmt: skip
            b_max += b_offset
            b_out = with_values(b_out, b_weight, b_sum, statistics_ptr, layer, head, o_d, stored, H=H, D=D)
        _store_partials(addresses_ptr, low_of(last).to(tl.int64) + i_row, b_max, b_sum, b_out, o_d, m_m, DV=DV)
        index_address, keys, readers, last = load_item(
            item + tl.num_programs(0), num_suffix_items, suffix_items_ptr, layer, addresses_ptr, CLASS=CLASS
        )


def advance(addresses: TableAddresses, step: Step) -> None:
    """Number the work items of the suffixes for the lengths of this step: one small launch per class."""
    tables = addresses.tables
    for which, class_tables in enumerate(tables.classes):
        num_requests = class_tables.requests.numel()
        if not num_requests:
            # The split kernel reads how many there are from here, also where there are none.
            step.item_start[which].zero_()
            continue
        suffix_work_kernel[(num_requests,)](
            *(addresses.on_device, step.seq_lens, step.pool_rows, step.items[which], step.item_start[which]),
            *(num_requests, step.req_to_token.data_ptr(), step.req_to_token.stride(0)),
            CLASS=which,
            LEAST=chunks.MIN_CHUNKS[which],
            ROW_TILE=tables.sizes.decode_rows[which],
            NUM_ITEMS=tables.sizes.num_items,
            STEP=chunks.CHUNK_STEP,
            H=tables.sizes.num_kv_heads,
            G=tables.sizes.group_size,
            BLOCK=REQUEST_BLOCK,
            FILL=128,
        )


def run_split(addresses: TableAddresses, step: Step, inputs: LayerInputs, out: Tensor, lse: Tensor) -> None:
    """Attend with the requests of up to 128 q rows per KV head: one launch per class, and the merge."""
    for which in range(NUM_CLASSES):
        if addresses.has_work(which):
            _launch_split(addresses, step, which, inputs)
    run_merge(addresses, step, inputs, out, lse)


def _launch_split(addresses: TableAddresses, step: Step, which: int, inputs: LayerInputs) -> None:
    q, head_dim = inputs.q, inputs.q.shape[2]
    tables, class_tables = addresses.tables, addresses.tables.classes[which]
    has_window, has_few_bits, is_fp8 = inputs.window > 0, inputs.coding is not None, inputs.k_arena.dtype == FP8
    tiles = tiles_for(limits_of(q.device), head_dim, has_window=has_window, has_few_bits=has_few_bits, is_fp8=is_fp8)
    tile = tiles[which]
    args = (
        *(addresses.on_device, q, inputs.k_arena, inputs.v_arena, *inputs.steps),
        *(step.seq_lens, step.items[which], step.item_start[which], step.visible, inputs.statistics),
        *(inputs.layer, class_tables.requests.numel(), inputs.k_arena.shape[1], q.stride(0)),
        *(inputs.sm_scale * LOG2_E, inputs.window),
    )
    options: dict[str, object] = {
        "CLASS": which,
        "H": tables.sizes.num_kv_heads,
        "G": tables.sizes.group_size,
        **block_widths(head_dim, inputs.v_head_dim),
        "WINDOWED": has_window,
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.keys,
        "NARROW_N": narrow_keys(tile),
        "UPCAST": not q.is_cuda,
        "PDL": dependent_launch(q.device)["PDL"],
        "num_stages": tile.stages,
        "num_warps": tile.warps,
    }
    num_programs = _num_programs(inputs, tile, args, options)
    # A replay may have more work than the batch that was captured.
    if not addresses.is_captured:
        num_programs = min(num_programs, class_tables.max_items + class_tables.max_suffix_items)
    _split_kernel[(num_programs,)](*args, **options)


_NUM_PROGRAMS: dict[tuple[object, ...], int] = {}


def _num_programs(inputs: LayerInputs, tile: Tile, args: tuple[object, ...], options: dict[str, object]) -> int:
    """Programs of a persistent launch: as many as are resident at once; never depends on the batch."""
    q = inputs.q
    if not q.is_cuda:
        return INTERPRETER_PROGRAMS
    key = (q.device, q.dtype, inputs.k_arena.dtype, *(arg is None for arg in args), *options.values())
    if key not in _NUM_PROGRAMS:
        # Only the compiled kernel knows how many registers and how much shared memory it takes.
        compiled = _split_kernel.warmup(*args, grid=(1,), **options)
        compiled._init_handles()
        limits = limits_of(q.device)
        shared = int(compiled.metadata.shared)
        resident = limits.programs_per_sm(registers=compiled.n_regs, shared=shared, num_warps=tile.warps)
        _NUM_PROGRAMS[key] = resident * limits.num_sms
    return _NUM_PROGRAMS[key]
