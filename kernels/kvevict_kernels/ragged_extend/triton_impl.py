"""ragged_extend on the device: a program owns one tile of q rows of one KV head and walks over all its keys.

Spans and own tokens go through one loop nest: with two, ptxas serialises the tensor-core instructions of both.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvevict_kernels.ragged_decode.host_lists import EXTEND_TILE
from kvevict_kernels.ragged_decode.tables import LayerInputs, Step, Tables
from kvevict_kernels.ragged_decode.triton_impl import LOG2_E, attend_block

KEY_BLOCK = 64
NUM_WARPS = 8


@triton.jit(do_not_specialize=["layer", "num_spans", "row_stride", "req_to_token"])
def _extend_kernel(
    q_ptr,  # [N, H * G, D]
    k_ptr,  # [L, T, H, D]
    v_ptr,
    out_ptr,  # [N, H * G, D]
    lse_ptr,  # [N, H * G] float32, natural
    tile_request_ptr,
    tile_index_ptr,
    path_start_ptr,
    path_span_ptr,
    run_address_ptr,
    run_lens_ptr,
    members_ptr,
    request_members_ptr,
    new_lens_ptr,
    waterlines_ptr,
    seq_lens_ptr,
    pool_rows_ptr,
    req_to_token,  # address of [rows, row_stride] int32
    layer,
    num_spans,
    row_stride,
    num_token_slots,
    scale_log2,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UPCAST: tl.constexpr,
):
    request = tl.load(tile_request_ptr + tl.program_id(0))
    head = tl.program_id(1)
    o_d = tl.arange(0, BLOCK_D)
    count = tl.load(new_lens_ptr + request)
    i_row = tl.load(tile_index_ptr + tl.program_id(0)) * BLOCK_M + tl.arange(0, BLOCK_M)
    m_m = i_row < count * G
    m_qo = m_m[:, None] & (o_d < D)[None, :]
    token = i_row // G
    first = tl.load(members_ptr + tl.load(request_members_ptr + request)).to(tl.int64)
    q_row = (first + token) * (H * G) + head * G + i_row % G
    b_q = tl.load(q_ptr + q_row[:, None] * D + o_d[None, :], mask=m_qo, other=0.0)
    if UPCAST:
        b_q = b_q.to(tl.float32)
    b_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    b_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    b_out = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)

    waterline = tl.load(waterlines_ptr + request)
    # Keys before the first new token, and those of the tile's last one.
    num_before = tl.load(seq_lens_ptr + request) - waterline - count
    num_own = num_before + tl.minimum(tl.max(token, 0) + 1, count)
    own_address = req_to_token + (tl.load(pool_rows_ptr + request) * row_stride + waterline) * 4
    path_end = tl.load(path_start_ptr + request + 1)
    for j in range(tl.load(path_start_ptr + request), path_end + 1):  # spans, then the own tokens
        if j < path_end:
            unit = (layer * num_spans + tl.load(path_span_ptr + j)) * H + head
            num_kv = tl.load(run_lens_ptr + unit)
            address = tl.load(run_address_ptr + unit)
        else:
            num_kv = num_own
            address = own_address
        is_own = (j >= path_end).to(tl.int32)
        slot_scale = 1 + is_own * (H - 1)
        slot_shift = is_own * (layer.to(tl.int64) * num_token_slots * H + head)
        limit = tl.where(is_own > 0, num_before + token + 1, num_kv)
        index_ptr = address.to(tl.pointer_type(tl.int32))
        for start in range(0, num_kv, BLOCK_N):
            n = start + tl.arange(0, BLOCK_N)
            m_n = n < num_kv
            head_slot = tl.load(index_ptr + n, mask=m_n, other=0).to(tl.int64) * slot_scale + slot_shift
            seen = m_n[None, :] & (n[None, :] < limit[:, None])
            b_max, b_sum, b_out = attend_block(
                b_q, b_max, b_sum, b_out, k_ptr, v_ptr, head_slot, m_n, seen, o_d, scale_log2, D=D, UPCAST=UPCAST
            )

    divisor = tl.where(b_sum > 0.0, b_sum, 1.0)
    tl.store(out_ptr + q_row[:, None] * D + o_d[None, :], b_out / divisor[:, None], mask=m_qo)
    tl.store(lse_ptr + q_row, (b_max + tl.log2(divisor)) * 0.6931471805599453, mask=m_m)


def run_extend(tables: Tables, step: Step, inputs: LayerInputs, out: Tensor, lse: Tensor) -> None:
    """Device path of :func:`kvevict_kernels.ragged_extend.run_ragged_extend`: one launch."""
    q, head_dim = inputs.q, inputs.q.shape[2]
    _extend_kernel[(tables.tile_request.numel(), tables.num_kv_heads)](
        q,
        inputs.k_arena,
        inputs.v_arena,
        out,
        lse,
        tables.tile_request,
        tables.tile_index,
        tables.path_start,
        tables.path_span,
        tables.run_address,
        tables.run_lens,
        tables.members,
        tables.request_members,
        tables.new_lens_device,
        tables.waterlines,
        step.seq_lens,
        step.pool_rows,
        step.req_to_token.data_ptr(),
        inputs.layer,
        tables.num_spans,
        step.req_to_token.stride(0),
        inputs.k_arena.shape[1],
        inputs.sm_scale * LOG2_E,
        H=tables.num_kv_heads,
        G=tables.group_size,
        D=head_dim,
        BLOCK_M=EXTEND_TILE,
        BLOCK_N=KEY_BLOCK,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        UPCAST=not q.is_cuda,
        num_warps=NUM_WARPS,
    )
