"""compact_kv on the device: a gather launch into a temporary, then a write launch, ordered by the stream.

Let R be the token slots that the call writes in any layer. A row whose source lies outside R waits for the write
launch and moves directly; only the others, and weighted sums, go through the temporary. The gather launch writes no
row of the arena. The write launch writes only rows of R and reads only the temporary and rows outside R. So in neither
does a program read what another one writes, and no order of programs, or of accesses within one, can be wrong.

K and V, and groups of columns of a row, are independent of each other; the launcher takes them one after the
other whenever a temporary for whole rows would be larger than ``STAGING_BYTES``. The temporary has a place for every
row: how many use theirs is known on the device only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvevict_kernels.head_slots import token_slot_of
from kvevict_kernels.stored_rows import as_moved

STAGING_BYTES = 256 * 2**20
MIN_GROUP_BYTES = 32
"""One memory sector: narrower column groups would read every sector twice."""
ROW_BLOCK = 64
WIDE = 128
"""Wider rows take twice the warps, or their sums would not fit into registers (columns)."""
INDICES = ("src_ptr", "dst_ptr", "staged_ptr", "indptr_ptr", "weights_ptr")
"""One or two words a row; whether they are aligned depends on the call and must not call for another compilation."""


@triton.jit(do_not_specialize=["num_out"], do_not_specialize_on_alignment=list(INDICES))
def _gather_kernel(
    rows_ptr,  # [num_rows, HEAD_DIM]
    staging_ptr,  # [C, width]
    src_ptr,  # [C] int32
    staged_ptr,  # [C] int8
    num_out,
    first_column,
    width,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """staging[i] = rows[src[i], first_column : first_column + width] where staged[i], bits unchanged."""
    i_out = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    o_col = tl.arange(0, BLOCK_D)
    m_staged = tl.load(staged_ptr + i_out, mask=i_out < num_out, other=0) != 0
    mask = m_staged[:, None] & (o_col < width)[None, :]
    src = tl.load(src_ptr + i_out, mask=m_staged, other=0).to(tl.int64)
    b_rows = tl.load(rows_ptr + src[:, None] * HEAD_DIM + first_column + o_col[None, :], mask=mask)  # [BLOCK, BLOCK_D]
    tl.store(staging_ptr + i_out[:, None] * width + o_col[None, :], b_rows, mask=mask)


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
    """staging[i] = sum over the run of i, in ascending order; a block lasts as long as its longest run."""
    i_out = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    o_col = tl.arange(0, BLOCK_D)
    m_out = i_out < num_out
    m_col = (o_col < width)[None, :]
    begin = tl.load(indptr_ptr + i_out, mask=m_out, other=0)
    length = tl.load(indptr_ptr + i_out + 1, mask=m_out, other=0) - begin
    acc = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
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
    src_ptr,  # [C] int32; read only where not staged
    dst_ptr,  # [C] int32
    staged_ptr,  # [C] int8
    num_out,
    first_column,
    width,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The columns of rows[dst[i]] = staging[i] where staged[i], else those of rows[src[i]]; bits unchanged."""
    i_out = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    o_col = tl.arange(0, BLOCK_D)
    m_out = i_out < num_out
    mask = m_out[:, None] & (o_col < width)[None, :]
    m_staged = tl.load(staged_ptr + i_out, mask=m_out, other=0) != 0
    src = tl.load(src_ptr + i_out, mask=m_out & ~m_staged, other=0).to(tl.int64)
    dst = tl.load(dst_ptr + i_out, mask=m_out, other=0).to(tl.int64)
    p_columns = rows_ptr + first_column + o_col[None, :]
    p_staging = staging_ptr + i_out[:, None] * width + o_col[None, :]
    p_from = tl.where(m_staged[:, None], p_staging, p_columns + src[:, None] * HEAD_DIM)
    b_rows = tl.load(p_from, mask=mask)  # [BLOCK, BLOCK_D]
    tl.store(p_columns + dst[:, None] * HEAD_DIM, b_rows, mask=mask)


def column_groups(num_rows: int, head_dim: int, element_size: int, limit: int) -> list[tuple[int, int]]:
    """Split a row into column groups whose temporary stays within a limit.

    Args:
        num_rows: rows of the temporary.
        head_dim: columns of a row.
        element_size: bytes per column.
        limit: bytes the temporary may take, unless one group of ``MIN_GROUP_BYTES`` already takes more.

    Returns:
        (first column, width) of every group, in order. Widths are powers of two, or the whole row, and the last is what
        remains: the first column is aligned whatever the number of rows, and no length calls for another compilation.
    """
    width = head_dim
    while num_rows * width * element_size > limit and width * element_size > MIN_GROUP_BYTES:
        width = triton.next_power_of_2(width) // 2
    return [(first, min(width, head_dim - first)) for first in range(0, head_dim, width)]


def rows_to_stage(src: Tensor, dst: Tensor, num_token_slots: int, num_kv_heads: int) -> Tensor:
    """Find the moves whose source lies in a token slot that the same call writes, in whatever layer and lane.

    Callers fill their token slots, so a flag for each slot tells as much as one for each row, which would take layers
    times heads as much memory.

    Args:
        src: [C], int32, head slots to read.
        dst: [C], int32, head slots to write.
        num_token_slots: token slots of the arena.
        num_kv_heads: head slots of a token slot in a layer.

    Returns:
        [C], int8: 1 where the row has to go through the temporary, else 0.

    Cost: reads C indices a few times and the token slots once; no host sync.
    """
    written = torch.zeros(num_token_slots, dtype=torch.int8, device=dst.device)
    written.index_fill_(0, token_slot_of(dst, num_token_slots, num_kv_heads).long(), 1)
    return written.index_select(0, token_slot_of(src, num_token_slots, num_kv_heads))


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

    Rows are moved in column groups where a temporary for whole rows would exceed ``staging_bytes``. Weighted sums all
    go through it: most runs of several sources have one where the call writes.
    """
    _, num_token_slots, num_kv_heads, head_dim = k_arena.shape
    num_out = dst.numel()
    if indptr is None:
        staged = rows_to_stage(src, dst, num_token_slots, num_kv_heads)
    else:
        staged = torch.ones(num_out, dtype=torch.int8, device=dst.device)
    grid = (triton.cdiv(num_out, ROW_BLOCK),)
    groups = column_groups(num_out, head_dim, k_arena.element_size(), staging_bytes)
    buffer = torch.empty(num_out * groups[0][1], dtype=k_arena.dtype, device=k_arena.device)
    sizes = {
        "HEAD_DIM": head_dim,
        "BLOCK_D": triton.next_power_of_2(head_dim),
        "BLOCK": ROW_BLOCK,
        "num_warps": 4 if head_dim <= WIDE else 8,
    }
    if indptr is None:
        k_arena, v_arena, buffer = as_moved(k_arena), as_moved(v_arena), as_moved(buffer)
    for rows in (k_arena, v_arena):
        for first_column, width in groups:
            columns = (num_out, first_column, width)
            if indptr is None:
                _gather_kernel[grid](rows, buffer, src, staged, *columns, **sizes)
            else:
                _gather_sum_kernel[grid](rows, buffer, src, indptr, weights, *columns, **sizes)
            _write_kernel[grid](rows, buffer, src, dst, staged, *columns, **sizes)
