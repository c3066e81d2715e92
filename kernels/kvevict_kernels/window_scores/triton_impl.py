"""window_scores on the device: a program owns a tile of keys of one KV head and walks over its query rows.

Pooling by rows needs neighbours, so tiles overlap by the pooling halo and the window maximum is built inside
the tile by doubling (spans 1, 2, 4, then the rest); the attention weights never reach memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvevict_kernels.window_scores.pooling import KEY_BLOCK, MIN_VALID_KEYS, Pooling

ROW_BLOCK = 32
"""Half as many beside a larger tile of keys, or weights would not fit into registers."""
NUM_WARPS = 4
"""Twice as many for a larger tile, which four could not hold in registers."""
WIDE = 128
"""Wider rows leave room in the shared memory of an sm_89 for one tile of queries less."""


@triton.jit(
    do_not_specialize=["num_keys", "first_key", "W"],
    do_not_specialize_on_alignment=["lse_ptr", "token_slots_ptr", "pooled_ptr", "mean_ptr"],
)
def _window_scores_kernel(
    q_ptr,  # [W, HQ, D]
    lse_ptr,  # [W, HQ] float32
    k_ptr,  # [T, H, D]
    token_slots_ptr,  # [N] int64
    pooled_ptr,  # [H, N] float32, written if KERNEL > 1
    mean_ptr,  # [H, N] float32
    num_keys,
    first_key,  # position of key 0 relative to query 0
    sm_scale,
    W,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    KERNEL: tl.constexpr,  # pooling window, 1 = no pooling by rows
    NUM_DOUBLINGS: tl.constexpr,  # ceil(log2(KERNEL))
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UPCAST: tl.constexpr,  # float32 products: the interpreter cannot multiply bfloat16
):
    HALO: tl.constexpr = KERNEL // 2
    VALID: tl.constexpr = BLOCK_N - 2 * HALO
    i_h = tl.program_id(1)
    o_tile = tl.arange(0, BLOCK_N)
    n = tl.program_id(0) * VALID - HALO + o_tile  # [BLOCK_N] key of each column, halo included
    m_n = (n >= 0) & (n < num_keys)
    o_d = tl.arange(0, BLOCK_D)
    slot = tl.load(token_slots_ptr + n, mask=m_n, other=0)
    p_k = k_ptr + (slot * H + i_h)[None, :] * D + o_d[:, None]
    b_k = tl.load(p_k, mask=m_n[None, :] & (o_d < D)[:, None], other=0.0)  # [BLOCK_D, BLOCK_N]
    b_k = b_k.to(tl.float32 if UPCAST else q_ptr.dtype.element_ty)
    mean_sum = tl.zeros([BLOCK_N], dtype=tl.float32)
    pooled_sum = tl.zeros([BLOCK_N], dtype=tl.float32)
    for start in range(0, W * G, BLOCK_R):
        row = start + tl.arange(0, BLOCK_R)
        m_r = row < W * G
        w = row // G
        q_row = w * (H * G) + i_h * G + row % G
        b_q = tl.load(
            q_ptr + q_row.to(tl.int64)[:, None] * D + o_d[None, :],
            mask=m_r[:, None] & (o_d < D)[None, :],
            other=0.0,
        )  # [BLOCK_R, BLOCK_D]
        if UPCAST:
            b_q = b_q.to(tl.float32)
        b_lse = tl.load(lse_ptr + q_row, mask=m_r, other=0.0)
        s = sm_scale * tl.dot(b_q, b_k, input_precision="ieee") - b_lse[:, None]
        seen = m_r[:, None] & m_n[None, :] & (first_key + n[None, :] <= w[:, None])
        p = tl.exp(tl.where(seen, s, float("-inf")))  # [BLOCK_R, BLOCK_N]; pads with 0: no weight is less
        mean_sum += tl.sum(p, 0)
        if KERNEL > 1:
            for i in tl.static_range(NUM_DOUBLINGS):
                shifted = tl.minimum(o_tile + min(2**i, KERNEL - 2**i), BLOCK_N - 1)
                p = tl.maximum(p, tl.gather(p, tl.broadcast_to(shifted[None, :], (BLOCK_R, BLOCK_N)), 1))
            pooled_sum += tl.sum(p, 0)
    norm = 1.0 / (W * G)
    out = i_h.to(tl.int64) * num_keys
    m_mean = m_n & (o_tile >= HALO) & (o_tile < HALO + VALID)
    tl.store(mean_ptr + out + n, mean_sum * norm, mask=m_mean)
    if KERNEL > 1:  # column j holds the window that starts at n[j], so its centre is n[j] + HALO
        m_pooled = (o_tile < VALID) & (n + HALO < num_keys)
        tl.store(pooled_ptr + out + n + HALO, pooled_sum * norm, mask=m_pooled)


def window_scores_triton(
    queries: Tensor,
    lse: Tensor,
    k_buffer: Tensor,
    token_slots: Tensor,
    sm_scale: float,
    first_key: int,
    pooling: Pooling,
) -> tuple[Tensor, Tensor]:
    """Device path of :func:`kvevict_kernels.window_scores.window_scores`: one launch, K read once.

    ``first_key`` is the position of the first key relative to the first query, negative as a rule.
    """
    window_size, num_qo_heads, head_dim = queries.shape
    num_kv_heads = k_buffer.shape[1]
    num_keys = token_slots.numel()
    kernel_size = pooling.kernel_size if pooling.pools_rows else 1
    key_block = max(KEY_BLOCK, triton.next_power_of_2(kernel_size + MIN_VALID_KEYS))
    is_small = key_block == KEY_BLOCK
    mean = torch.empty(num_kv_heads, num_keys, dtype=torch.float32, device=queries.device)
    pooled = torch.empty_like(mean)
    grid = (triton.cdiv(num_keys, key_block - (kernel_size - 1)), num_kv_heads)
    _window_scores_kernel[grid](
        queries,
        lse,
        k_buffer,
        token_slots,
        pooled,
        mean,
        num_keys,
        first_key,
        sm_scale,
        window_size,
        H=num_kv_heads,
        G=num_qo_heads // num_kv_heads,
        D=head_dim,
        KERNEL=kernel_size,
        NUM_DOUBLINGS=(kernel_size - 1).bit_length(),
        BLOCK_R=ROW_BLOCK if is_small else ROW_BLOCK // 2,
        BLOCK_N=key_block,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        UPCAST=not queries.is_cuda,
        num_warps=NUM_WARPS if is_small else 2 * NUM_WARPS,
        num_stages=3 if head_dim <= WIDE else 2,
    )
    return (pooled if pooling.pools_rows else pooling.pool(mean)), mean
