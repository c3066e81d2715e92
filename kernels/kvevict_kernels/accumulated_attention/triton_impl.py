"""accumulated_attention on the device: a program owns a tile of keys of one KV head and walks over the query rows.

It begins at the first query that sees one of its keys. The attention weights never reach memory, and every sum or
maximum is taken by one program in one order.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

POWERS = {"sum": 1, "squares": 2, "max": 0}
ROW_BLOCK = 64
KEY_BLOCK = 64
"""Small tiles: a layer has few KV heads, and a prompt must give every processor of the device a program."""


@triton.jit(
    do_not_specialize=["num_keys", "first_key", "num_queries"],
    do_not_specialize_on_alignment=["lse_ptr", "token_slots_ptr", "out_ptr"],
)
def _accumulated_attention_kernel(
    q_ptr,  # [num_queries, HQ, D]
    lse_ptr,  # [num_queries, HQ] float32
    k_ptr,  # [T, H, D]
    token_slots_ptr,  # [N] int64
    out_ptr,  # [H, N] float32
    num_keys,
    first_key,  # position of key 0 relative to query 0
    sm_scale,
    num_queries,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    LOG2_E: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    POWER: tl.constexpr,  # of the weights that are summed, 1 or 2; 0 for their maximum
    UPCAST: tl.constexpr,  # float32 products: the interpreter cannot multiply bfloat16
):
    i_h = tl.program_id(1)
    begin = tl.program_id(0) * BLOCK_N
    n = begin + tl.arange(0, BLOCK_N)  # [BLOCK_N] key of each column
    m_n = n < num_keys
    o_d = tl.arange(0, BLOCK_D)
    slot = tl.load(token_slots_ptr + n, mask=m_n, other=0)
    p_k = k_ptr + (slot * H + i_h)[None, :] * D + o_d[:, None]
    b_k = tl.load(p_k, mask=m_n[None, :] & (o_d < D)[:, None], other=0.0)  # [BLOCK_D, BLOCK_N]
    b_k = b_k.to(tl.float32 if UPCAST else q_ptr.dtype.element_ty)
    acc = tl.zeros([BLOCK_N], dtype=tl.float32)
    first_query = tl.maximum(first_key + begin, 0)
    for start in range(first_query * G, num_queries * G, BLOCK_R):
        row = start + tl.arange(0, BLOCK_R)
        m_r = row < num_queries * G
        i = row // G
        q_row = i.to(tl.int64) * (H * G) + i_h * G + row % G
        b_q = tl.load(
            q_ptr + q_row[:, None] * D + o_d[None, :],
            mask=m_r[:, None] & (o_d < D)[None, :],
            other=0.0,
        )  # [BLOCK_R, BLOCK_D]
        if UPCAST:
            b_q = b_q.to(tl.float32)
        b_lse = tl.load(lse_ptr + q_row, mask=m_r, other=0.0)
        s = sm_scale * tl.dot(b_q, b_k, input_precision="ieee") - b_lse[:, None]
        seen = m_r[:, None] & m_n[None, :] & (first_key + n[None, :] <= i[:, None])
        p = tl.exp2(tl.where(seen, s * LOG2_E, float("-inf")))  # [BLOCK_R, BLOCK_N]
        if POWER == 0:
            acc = tl.maximum(acc, tl.max(p, 0))
        elif POWER == 2:
            acc += tl.sum(p * p, 0)
        else:
            acc += tl.sum(p, 0)
    if POWER == 1:
        acc = acc / G
    tl.store(out_ptr + i_h.to(tl.int64) * num_keys + n, acc, mask=m_n)


def accumulated_attention_triton(
    queries: Tensor,
    lse: Tensor,
    k_buffer: Tensor,
    token_slots: Tensor,
    sm_scale: float,
    first_key: int,
    reduction: Literal["sum", "squares", "max"],
) -> Tensor:
    """Device path of :func:`kvevict_kernels.accumulated_attention.accumulated_attention`: one launch, K read once.

    ``first_key`` is the position of the first key relative to the first query.
    """
    num_queries, num_qo_heads, head_dim = queries.shape
    num_kv_heads = k_buffer.shape[1]
    num_keys = token_slots.numel()
    out = torch.empty(num_kv_heads, num_keys, dtype=torch.float32, device=queries.device)
    grid = (triton.cdiv(num_keys, KEY_BLOCK), num_kv_heads)
    _accumulated_attention_kernel[grid](
        queries,
        lse,
        k_buffer,
        token_slots,
        out,
        num_keys,
        first_key,
        sm_scale,
        num_queries,
        H=num_kv_heads,
        G=num_qo_heads // num_kv_heads,
        D=head_dim,
        LOG2_E=math.log2(math.e),
        BLOCK_R=ROW_BLOCK,
        BLOCK_N=KEY_BLOCK,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        POWER=POWERS[reduction],
        UPCAST=not queries.is_cuda,
    )
    return out
