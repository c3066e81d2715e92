"""compact_kv on the device: two launches, ordered by the stream, and a temporary for rows that neither can move.

README.md says which rows go through the temporary, and why the order of programs does not matter. The temporary has a
place for every row: only the device knows how many rows use it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvevict_kernels.row_sizes import token_slot_of
from kvevict_kernels.stored_rows import as_moved

STAGING_BYTES = 256 * 2**20
MIN_GROUP_BYTES = 32
"""One memory sector: with narrower column groups every sector would be read twice."""
ROW_BLOCK = 64
MAX_COLUMNS = 256
"""Columns of a group: what a block of rows has registers for. Latents are wider."""
WIDE = 128
"""Columns. Wider rows take twice the warps, so that their sums fit into registers."""
HOLE, STAGED, DIRECT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Kinds of moves: in the first launch; out of the arena in the first launch and to its place in the second; in the
second launch."""
INDEX_BLOCK = 1024
INDICES = ("src_ptr", "dst_ptr", "kind_ptr", "indptr_ptr", "weights_ptr", "place_ptr", "occupied_ptr")
"""Index pointers. Not specialised on alignment, which varies by call and would cause recompilation."""


@triton.jit
def _cell_of(row, place_ptr, mask, num_token_slots, num_kv_heads, num_places):
    """Rank of a row's token slot among those that are written (-1: it is not), and the row's place in ``occupied``."""
    slot = row // num_kv_heads
    place = tl.load(place_ptr + slot % num_token_slots, mask=mask, other=-1)
    cell = ((slot // num_token_slots).to(tl.int64) * num_places + place) * num_kv_heads + row % num_kv_heads
    return place, cell


@triton.jit(do_not_specialize=["num_out", "num_places"], do_not_specialize_on_alignment=list(INDICES))
def _mark_kernel(
    src_ptr,  # [C] int32
    place_ptr,  # [num_token_slots] int32
    occupied_ptr,  # [num_layers, num_places, num_kv_heads] int8
    num_out,
    num_token_slots,
    num_kv_heads,
    num_places,
    BLOCK: tl.constexpr,
):
    """Mark the rows of written token slots that are sources."""
    i_out = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_out = i_out < num_out
    src = tl.load(src_ptr + i_out, mask=m_out, other=0)
    place, cell = _cell_of(src, place_ptr, m_out, num_token_slots, num_kv_heads, num_places)
    # Programs may store the same 1: no atomic is needed.
    tl.store(occupied_ptr + cell, 1, mask=(place >= 0) & (place < num_places))


@triton.jit(do_not_specialize=["num_out", "num_places"], do_not_specialize_on_alignment=list(INDICES))
def _kind_kernel(
    src_ptr,  # [C] int32
    dst_ptr,  # [C] int32
    place_ptr,  # [num_token_slots] int32
    occupied_ptr,  # [num_layers, num_places, num_kv_heads] int8
    kind_ptr,  # [C] int8
    num_out,
    num_token_slots,
    num_kv_heads,
    num_places,
    BLOCK: tl.constexpr,
):
    """The kind of every move; a written token slot without a place in ``occupied`` is taken to hold only sources."""
    i_out = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_out = i_out < num_out
    src = tl.load(src_ptr + i_out, mask=m_out, other=0)
    dst = tl.load(dst_ptr + i_out, mask=m_out, other=0)
    from_place, _ = _cell_of(src, place_ptr, m_out, num_token_slots, num_kv_heads, num_places)
    to_place, cell = _cell_of(dst, place_ptr, m_out, num_token_slots, num_kv_heads, num_places)
    # A row beyond the flags counts as a source, which is always safe: it takes the way through the temporary.
    is_hole = tl.load(occupied_ptr + cell, mask=(to_place >= 0) & (to_place < num_places), other=1) == 0
    kind = tl.where(is_hole, HOLE, tl.where(from_place >= 0, STAGED, DIRECT))
    tl.store(kind_ptr + i_out, kind.to(tl.int8), mask=m_out)


@triton.jit(do_not_specialize=["num_out"], do_not_specialize_on_alignment=list(INDICES))
def _gather_kernel(
    rows_ptr,  # [num_rows, HEAD_DIM]
    staging_ptr,  # [C, width]
    src_ptr,  # [C] int32
    dst_ptr,  # [C] int32
    kind_ptr,  # [C] int8
    num_out,
    first_column,
    width,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The columns of rows[src[i]] go to rows[dst[i]] if that is a hole, or to staging[i] if staged; bits unchanged."""
    # int64 before the product with a row's length: the arena has more elements than int32 counts.
    i_out = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    o_col = tl.arange(0, BLOCK_D)
    # Beyond the end there is a kind with which this launch does nothing.
    kind = tl.load(kind_ptr + i_out, mask=i_out < num_out, other=DIRECT)
    m_moved = kind != DIRECT
    mask = m_moved[:, None] & (o_col < width)[None, :]
    src = tl.load(src_ptr + i_out, mask=m_moved, other=0).to(tl.int64)
    dst = tl.load(dst_ptr + i_out, mask=kind == HOLE, other=0).to(tl.int64)
    p_columns = rows_ptr + first_column + o_col[None, :]
    b_rows = tl.load(p_columns + src[:, None] * HEAD_DIM, mask=mask)  # [BLOCK, BLOCK_D]
    p_staging = staging_ptr + i_out[:, None] * width + o_col[None, :]
    tl.store(tl.where((kind == HOLE)[:, None], p_columns + dst[:, None] * HEAD_DIM, p_staging), b_rows, mask=mask)


@triton.jit(do_not_specialize=["num_out"], do_not_specialize_on_alignment=list(INDICES))
def _gather_sum_kernel(
    rows_ptr,  # [num_rows, HEAD_DIM]
    staging_ptr,  # [C, width]
    src_ptr,  # [M] int32
    indptr_ptr,  # [C + 1] int32
    weights_ptr,  # [M] float32
    num_out,
    first_column,
    width,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """staging[i] = weighted sum of the run of i, in ascending order; a block runs as long as its longest run."""
    i_out = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    o_col = tl.arange(0, BLOCK_D)
    m_out = i_out < num_out
    m_col = (o_col < width)[None, :]
    begin = tl.load(indptr_ptr + i_out, mask=m_out, other=0)
    length = tl.load(indptr_ptr + i_out + 1, mask=m_out, other=0) - begin
    acc = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    # A fixed order, so that sums have the same bits in every call.
    for step in range(0, tl.max(length, 0)):
        m_run = step < length
        src = tl.load(src_ptr + begin + step, mask=m_run, other=0).to(tl.int64)
        weight = tl.load(weights_ptr + begin + step, mask=m_run, other=0.0)
        p_rows = rows_ptr + src[:, None] * HEAD_DIM + first_column + o_col[None, :]
        b_rows = tl.load(p_rows, mask=m_run[:, None] & m_col, other=0.0).to(tl.float32)
        acc += weight[:, None] * b_rows
    p_staging = staging_ptr + i_out[:, None] * width + o_col[None, :]
    tl.store(p_staging, acc.to(staging_ptr.dtype.element_ty), mask=m_out[:, None] & m_col)


@triton.jit(do_not_specialize=["num_out"], do_not_specialize_on_alignment=list(INDICES))
def _write_kernel(
    rows_ptr,  # [num_rows, HEAD_DIM]
    staging_ptr,  # [C, width]
    src_ptr,  # [C] int32; read only where direct
    dst_ptr,  # [C] int32
    kind_ptr,  # [C] int8
    num_out,
    first_column,
    width,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The columns of rows[dst[i]] = staging[i] if staged, those of rows[src[i]] if direct; bits unchanged."""
    i_out = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    o_col = tl.arange(0, BLOCK_D)
    # Beyond the end there is a kind with which this launch does nothing.
    kind = tl.load(kind_ptr + i_out, mask=i_out < num_out, other=HOLE)
    m_out = kind != HOLE
    mask = m_out[:, None] & (o_col < width)[None, :]
    src = tl.load(src_ptr + i_out, mask=kind == DIRECT, other=0).to(tl.int64)
    dst = tl.load(dst_ptr + i_out, mask=m_out, other=0).to(tl.int64)
    p_columns = rows_ptr + first_column + o_col[None, :]
    p_staging = staging_ptr + i_out[:, None] * width + o_col[None, :]
    p_from = tl.where((kind == STAGED)[:, None], p_staging, p_columns + src[:, None] * HEAD_DIM)
    b_rows = tl.load(p_from, mask=mask)  # [BLOCK, BLOCK_D]
    tl.store(p_columns + dst[:, None] * HEAD_DIM, b_rows, mask=mask)


def column_groups(num_rows: int, head_dim: int, element_size: int, limit: int) -> list[tuple[int, int]]:
    """Split a row into groups of up to 256 columns, so that a temporary of ``num_rows`` rows takes ``limit`` bytes.

    Groups are not cut below ``MIN_GROUP_BYTES``, even if the temporary is then larger.

    Returns:
        (first column, width) of every group, in order. Widths are powers of two or the whole row, except for the last,
        the remainder: first columns stay aligned, and no new length causes another compilation.
    """
    width = min(head_dim, MAX_COLUMNS)
    while num_rows * width * element_size > limit and width * element_size > MIN_GROUP_BYTES:
        width = triton.next_power_of_2(width) // 2
    return [(first, min(width, head_dim - first)) for first in range(0, head_dim, width)]


def kinds_of_moves(src: Tensor, dst: Tensor, num_layers: int, num_token_slots: int, num_kv_heads: int) -> Tensor:
    """In which launches each move (``src`` to ``dst``, [C], int32) is done; no host sync.

    A destination that is no source is a hole: the first launch fills it, whatever its source. Of the others those whose
    source lies in a token slot that the same call writes are staged. Callers fill their token slots completely, so the
    flags of their rows are as many as the moves; with other moves those of further token slots are taken as set.

    Returns:
        [C], int8: ``HOLE``, ``STAGED`` or ``DIRECT``.
    """
    num_out, device = dst.numel(), dst.device
    written = torch.zeros(num_token_slots, dtype=torch.int32, device=device)
    written.index_fill_(0, token_slot_of(dst, num_token_slots, num_kv_heads).long(), 1)
    place = torch.where(written > 0, written.cumsum(0, dtype=torch.int32) - 1, -1)
    # From the number of moves, which the host knows, and not of the written slots, which only the device counts.
    num_places = -(-num_out // (num_layers * num_kv_heads))
    occupied = torch.zeros(num_layers * num_places * num_kv_heads, dtype=torch.int8, device=device)
    kinds = torch.empty(num_out, dtype=torch.int8, device=device)
    sizes = (num_out, num_token_slots, num_kv_heads, num_places)
    grid = (triton.cdiv(num_out, INDEX_BLOCK),)
    _mark_kernel[grid](src, place, occupied, *sizes, BLOCK=INDEX_BLOCK)
    _kind_kernel[grid](src, dst, place, occupied, kinds, *sizes, BLOCK=INDEX_BLOCK)
    return kinds


def compact_kv_triton(
    k_arena: Tensor,
    v_arena: Tensor,
    src: Tensor,
    dst: Tensor,
    indptr: Tensor | None,
    weights: Tensor | None,
    *,
    staging_bytes: int = STAGING_BYTES,
) -> None:
    """Device path of :func:`kvevict_kernels.compact_kv.compact_kv`: two launches per arena and column group.

    Weighted sums all go through the temporary: most runs with several sources have one in a written token slot.
    """
    num_layers, num_token_slots, num_kv_heads, head_dim = k_arena.shape
    num_out = dst.numel()
    if indptr is None:
        kinds = kinds_of_moves(src, dst, num_layers, num_token_slots, num_kv_heads)
    else:
        kinds = torch.full((num_out,), STAGED.value, dtype=torch.int8, device=dst.device)
    grid = (triton.cdiv(num_out, ROW_BLOCK),)
    groups = column_groups(num_out, head_dim, k_arena.element_size(), staging_bytes)
    # One temporary for all groups of columns and both arenas: they are moved one after the other.
    buffer = torch.empty(num_out * groups[0][1], dtype=k_arena.dtype, device=k_arena.device)
    sizes = {
        "HEAD_DIM": head_dim,
        "BLOCK_D": triton.next_power_of_2(min(head_dim, MAX_COLUMNS)),
        "BLOCK": ROW_BLOCK,
        "num_warps": 4 if head_dim <= WIDE else 8,
    }
    if indptr is None:
        # Bits are moved, not numbers: sums alone need to know the type.
        k_arena, v_arena, buffer = as_moved(k_arena), as_moved(v_arena), as_moved(buffer)
    for rows in (k_arena, v_arena) if v_arena.numel() else (k_arena,):
        for first_column, width in groups:
            columns = (num_out, first_column, width)
            if indptr is None:
                _gather_kernel[grid](rows, buffer, src, dst, kinds, *columns, **sizes)
            else:
                _gather_sum_kernel[grid](rows, buffer, src, indptr, weights, *columns, **sizes)
            _write_kernel[grid](rows, buffer, src, dst, kinds, *columns, **sizes)
