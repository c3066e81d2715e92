"""ragged_attention on the device: split-KV over a work list, then a merge of the partials of each q row.

A work item is one chunk of a unit's KV run times one tile of its q rows; programs walk over items with a stride, so
uneven runs balance. Chunks have a fixed size: results do not depend on the size of the grid. Partials are float32,
log-sum-exps have base 2 until the merge.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 512
KEY_BLOCK = 64
PROGRAMS_PER_SM = 4
INTERPRETER_PROGRAMS = 3
LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class TritonPlan:
    """Work list on the device.

    Attributes:
        work: [num_work, 5], int64: start in ``qo_indices``, q rows, start in ``kv_indices``, KV rows, first
            partial.
        qo_indices: as given.
        kv_indices: as given.
        merge_indptr: [num_rows + 1], int64, partials of each q row in ``merge_indices``.
        merge_indices: [num_partials], int64.
        row_block: q rows per work item.
    """

    work: Tensor
    qo_indices: Tensor
    kv_indices: Tensor
    merge_indptr: Tensor
    merge_indices: Tensor
    row_block: int

    @property
    def num_rows(self) -> int:
        """Rows of ``q`` that the plan is for."""
        return self.merge_indptr.numel() - 1


@triton.jit(do_not_specialize=["num_work"])
def _partial_kernel(
    q_ptr,  # [R, D]
    k_ptr,  # [X, D]
    v_ptr,  # [X, D]
    work_ptr,  # [num_work, 5] int64
    qo_indices_ptr,
    kv_indices_ptr,
    out_ptr,  # [num_partials, D] float32
    lse_ptr,  # [num_partials] float32, base 2
    num_work,
    scale_log2,  # sm_scale * log2(e)
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UPCAST: tl.constexpr,  # float32 products: the interpreter cannot multiply bfloat16
):
    o_d = tl.arange(0, BLOCK_D)
    m_d = (o_d < D)[None, :]
    for item in range(tl.program_id(0), num_work, tl.num_programs(0)):
        p_work = work_ptr + item * 5
        q_start = tl.load(p_work)
        num_q = tl.load(p_work + 1)
        kv_start = tl.load(p_work + 2)
        num_kv = tl.load(p_work + 3).to(tl.int32)
        first_partial = tl.load(p_work + 4)
        o_m = tl.arange(0, BLOCK_M)
        m_m = o_m < num_q
        row = tl.load(qo_indices_ptr + q_start + o_m, mask=m_m, other=0).to(tl.int64)
        b_q = tl.load(q_ptr + row[:, None] * D + o_d[None, :], mask=m_m[:, None] & m_d, other=0.0)
        if UPCAST:
            b_q = b_q.to(tl.float32)
        b_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        b_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
        b_out = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
        for start in range(0, num_kv, BLOCK_N):
            n = start + tl.arange(0, BLOCK_N)
            m_n = n < num_kv
            slot = tl.load(kv_indices_ptr + kv_start + n, mask=m_n, other=0).to(tl.int64)
            p_kv = slot[:, None] * D + o_d[None, :]
            b_k = tl.load(k_ptr + p_kv, mask=m_n[:, None] & m_d, other=0.0)  # [BLOCK_N, BLOCK_D]
            b_v = tl.load(v_ptr + p_kv, mask=m_n[:, None] & m_d, other=0.0)
            if UPCAST:
                b_k = b_k.to(tl.float32)
                b_v = b_v.to(tl.float32)
            s = scale_log2 * tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
            s = tl.where(m_n[None, :], s, float("-inf"))  # never a whole row: a chunk's first key is real
            new_max = tl.maximum(b_max, tl.max(s, 1))
            p = tl.exp2(s - new_max[:, None])
            decay = tl.exp2(b_max - new_max)
            b_sum = b_sum * decay + tl.sum(p, 1)
            b_out = b_out * decay[:, None] + tl.dot(p.to(b_v.dtype), b_v, input_precision="ieee")
            b_max = new_max
        partial = first_partial + o_m
        tl.store(out_ptr + partial[:, None] * D + o_d[None, :], b_out / b_sum[:, None], mask=m_m[:, None] & m_d)
        tl.store(lse_ptr + partial, b_max + tl.log2(b_sum), mask=m_m)


@triton.jit
def _merge_kernel(
    partial_out_ptr,  # [num_partials, D] float32
    partial_lse_ptr,  # [num_partials] float32, base 2
    merge_indptr_ptr,  # [R + 1] int64
    merge_indices_ptr,  # [num_partials] int64
    out_ptr,  # [R, D]
    lse_ptr,  # [R] float32, natural
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < D
    begin = tl.load(merge_indptr_ptr + row)
    end = tl.load(merge_indptr_ptr + row + 1)
    if begin == end:
        tl.store(out_ptr + row * D + o_d, tl.zeros([BLOCK_D], dtype=tl.float32), mask=m_d)
        tl.store(lse_ptr + row, float("-inf"))
    else:
        partial = tl.load(merge_indices_ptr + begin)
        b_max = tl.load(partial_lse_ptr + partial)
        b_sum = b_max * 0.0 + 1.0
        b_out = tl.load(partial_out_ptr + partial * D + o_d, mask=m_d, other=0.0)
        for i in range(begin + 1, end):
            partial = tl.load(merge_indices_ptr + i)
            b_lse = tl.load(partial_lse_ptr + partial)
            new_max = tl.maximum(b_max, b_lse)
            decay = tl.exp2(b_max - new_max)
            weight = tl.exp2(b_lse - new_max)
            b_part = tl.load(partial_out_ptr + partial * D + o_d, mask=m_d, other=0.0)
            b_out = b_out * decay + b_part * weight
            b_sum = b_sum * decay + weight
            b_max = new_max
        tl.store(out_ptr + row * D + o_d, b_out / b_sum, mask=m_d)
        tl.store(lse_ptr + row, (b_max + tl.log2(b_sum)) * 0.6931471805599453)


def plan_triton(
    qo_indptr: Tensor, qo_indices: Tensor, kv_indptr: Tensor, kv_indices: Tensor, num_rows: int
) -> TritonPlan:
    """Build the work list on the device.

    Arguments as in :func:`kvevict_kernels.ragged_attention.ragged_attention`.
    """
    qo_indptr, kv_indptr = qo_indptr.long(), kv_indptr.long()
    qo_lens, kv_lens = qo_indptr.diff(), kv_indptr.diff()
    units = torch.arange(qo_lens.numel(), device=qo_indptr.device)
    # sync: once per plan, here and in repeat_interleave; plans outlive many steps.
    widest = int(qo_lens.max()) if qo_lens.numel() else 0
    row_block = min(64, max(16, triton.next_power_of_2(widest)))
    chunks = triton.cdiv(kv_lens, CHUNK)
    row_tiles = triton.cdiv(qo_lens, row_block)
    num_partials = chunks * qo_lens

    unit = units.repeat_interleave(chunks * row_tiles)
    local = _rank_in_group(chunks * row_tiles, unit)
    first_key = local // row_tiles[unit] * CHUNK
    first_row = local % row_tiles[unit] * row_block
    first_partial = (torch.cumsum(num_partials, 0) - num_partials)[unit] + first_key // CHUNK * qo_lens[unit]
    work = torch.stack(
        [
            qo_indptr[unit] + first_row,
            torch.clamp(qo_lens[unit] - first_row, max=row_block),
            kv_indptr[unit] + first_key,
            torch.clamp(kv_lens[unit] - first_key, max=CHUNK),
            first_partial + first_row,
        ],
        dim=1,
    )
    unit = units.repeat_interleave(num_partials)
    row_in_unit = _rank_in_group(num_partials, unit) % qo_lens[unit]
    owners, merge_indices = torch.sort(qo_indices[qo_indptr[unit] + row_in_unit].long(), stable=True)
    rows = torch.arange(num_rows + 1, device=owners.device)
    return TritonPlan(
        work=work,
        qo_indices=qo_indices,
        kv_indices=kv_indices,
        merge_indptr=torch.searchsorted(owners, rows),
        merge_indices=merge_indices,
        row_block=row_block,
    )


def run_triton(plan: TritonPlan, q: Tensor, k_rows: Tensor, v_rows: Tensor, sm_scale: float) -> tuple[Tensor, Tensor]:
    """Device path of :func:`kvevict_kernels.ragged_attention.run_ragged_attention`: two launches."""
    num_rows, head_dim = q.shape
    num_work = plan.work.shape[0]
    out = torch.empty_like(q)
    lse = torch.empty(num_rows, dtype=torch.float32, device=q.device)
    partial_out = torch.empty(plan.merge_indices.numel(), head_dim, dtype=torch.float32, device=q.device)
    partial_lse = torch.empty(plan.merge_indices.numel(), dtype=torch.float32, device=q.device)
    block_d = max(16, triton.next_power_of_2(head_dim))
    if num_work:
        _partial_kernel[(min(num_work, _num_programs(q.device)),)](
            q,
            k_rows,
            v_rows,
            plan.work,
            plan.qo_indices,
            plan.kv_indices,
            partial_out,
            partial_lse,
            num_work,
            sm_scale * LOG2_E,
            D=head_dim,
            BLOCK_M=plan.row_block,
            BLOCK_N=KEY_BLOCK,
            BLOCK_D=block_d,
            UPCAST=not q.is_cuda,
        )
    if num_rows:
        _merge_kernel[(num_rows,)](
            partial_out,
            partial_lse,
            plan.merge_indptr,
            plan.merge_indices,
            out,
            lse,
            D=head_dim,
            BLOCK_D=block_d,
        )
    return out, lse


def _num_programs(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETER_PROGRAMS
    return PROGRAMS_PER_SM * int(torch.cuda.get_device_properties(device).multi_processor_count)


def _rank_in_group(counts: Tensor, group: Tensor) -> Tensor:
    """Number the members of each group from 0; ``group`` holds group ``g`` ``counts[g]`` times, ascending."""
    first = torch.cumsum(counts, 0) - counts
    return torch.arange(group.numel(), device=group.device) - first[group]
