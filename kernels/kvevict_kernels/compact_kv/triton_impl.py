"""compact_kv on the device: a gather launch into a temporary, then a scatter launch, ordered by the stream.

K and V, and groups of columns of a row, are independent of each other; the launcher takes them one after the
other whenever a temporary for whole rows would be larger than ``STAGING_BYTES``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

STAGING_BYTES = 256 * 2**20
MIN_GROUP_BYTES = 32
"""One memory sector: narrower column groups would read every sector twice."""
ROW_BLOCK = 64


@triton.jit
def _gather_kernel(
    rows_ptr,  # [num_rows, HEAD_DIM]
    staging_ptr,  # [C, WIDTH]
    src_ptr,  # [C] int32
    num_out,
    first_column,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """staging[i] = rows[src[i], first_column : first_column + WIDTH], bits unchanged."""
    i_out = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    o_col = tl.arange(0, BLOCK_D)
    m_out = i_out < num_out
    mask = m_out[:, None] & (o_col < WIDTH)[None, :]
    src = tl.load(src_ptr + i_out, mask=m_out, other=0).to(tl.int64)
    b_rows = tl.load(rows_ptr + src[:, None] * HEAD_DIM + first_column + o_col[None, :], mask=mask)  # [BLOCK, BLOCK_D]
    tl.store(staging_ptr + i_out[:, None] * WIDTH + o_col[None, :], b_rows, mask=mask)


@triton.jit
def _gather_sum_kernel(
    rows_ptr,  # [num_rows, HEAD_DIM]
    staging_ptr,  # [C, WIDTH]
    src_ptr,  # [M] int32
    indptr_ptr,  # [C + 1] int32
    weights_ptr,  # [M] float32
    num_out,
    first_column,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """staging[i] = sum over the run of i, in ascending order; a block lasts as long as its longest run."""
    i_out = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    o_col = tl.arange(0, BLOCK_D)
    m_out = i_out < num_out
    m_col = (o_col < WIDTH)[None, :]
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
    p_staging = staging_ptr + i_out[:, None] * WIDTH + o_col[None, :]
    tl.store(p_staging, acc.to(staging_ptr.dtype.element_ty), mask=m_out[:, None] & m_col)


@triton.jit
def _scatter_kernel(
    rows_ptr,  # [num_rows, HEAD_DIM]
    staging_ptr,  # [C, WIDTH]
    dst_ptr,  # [C] int32
    num_out,
    first_column,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """rows[dst[i], first_column : first_column + WIDTH] = staging[i], bits unchanged."""
    i_out = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    o_col = tl.arange(0, BLOCK_D)
    m_out = i_out < num_out
    mask = m_out[:, None] & (o_col < WIDTH)[None, :]
    dst = tl.load(dst_ptr + i_out, mask=m_out, other=0).to(tl.int64)
    b_rows = tl.load(staging_ptr + i_out[:, None] * WIDTH + o_col[None, :], mask=mask)  # [BLOCK, BLOCK_D]
    tl.store(rows_ptr + dst[:, None] * HEAD_DIM + first_column + o_col[None, :], b_rows, mask=mask)


def column_groups(num_rows: int, head_dim: int, element_size: int, limit: int) -> list[tuple[int, int]]:
    """Split a row into column groups whose temporary stays within a limit.

    Args:
        num_rows: rows of the temporary.
        head_dim: columns of a row.
        element_size: bytes per column.
        limit: bytes the temporary may take, unless one group of ``MIN_GROUP_BYTES`` already takes more.

    Returns:
        (first column, width) of every group, in order; widths are multiples of ``MIN_GROUP_BYTES`` but the
        last.
    """
    unit = MIN_GROUP_BYTES // element_size
    units = max(1, limit // (num_rows * MIN_GROUP_BYTES))
    width = min(head_dim, units * unit)
    return [(first, min(width, head_dim - first)) for first in range(0, head_dim, width)]


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

    Rows are moved in column groups where a temporary for whole rows would exceed ``staging_bytes``.
    """
    head_dim = k_arena.shape[-1]
    num_out = dst.numel()
    grid = (triton.cdiv(num_out, ROW_BLOCK),)
    groups = column_groups(num_out, head_dim, k_arena.element_size(), staging_bytes)
    buffer = torch.empty(num_out * groups[0][1], dtype=k_arena.dtype, device=k_arena.device)
    for rows in (k_arena, v_arena):
        for first_column, width in groups:
            sizes = {
                "HEAD_DIM": head_dim,
                "WIDTH": width,
                "BLOCK_D": triton.next_power_of_2(width),
                "BLOCK": ROW_BLOCK,
            }
            if indptr is None:
                _gather_kernel[grid](rows, buffer, src, num_out, first_column, **sizes)
            else:
                _gather_sum_kernel[grid](rows, buffer, src, indptr, weights, num_out, first_column, **sizes)
            _scatter_kernel[grid](rows, buffer, dst, num_out, first_column, **sizes)
