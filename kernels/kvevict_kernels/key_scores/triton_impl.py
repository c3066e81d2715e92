"""key_scores on the device: one program per tile of keys of one KV head loops over the query rows.

A program begins at the first query that sees one of its keys. The attention weights never reach memory, and one program
computes each sum in a fixed order. Pooling by rows needs neighbours, so tiles overlap by the pooling halo,
and the window maximum is built inside the tile by doubling (spans 1, 2, 4, then the rest).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvevict_kernels.checks import FP8
from kvevict_kernels.key_scores import KEY_BLOCK, LATENT_KEYS, LOG2_E, MAX_HEAD_DIM, MIN_VALID_KEYS
from kvevict_kernels.ragged_decode.triton_block import load_rows

POWERS = {"sum": 1, "mean": 1, "squares": 2}
PLAIN_BLOCK = 64
"""Rows and keys of a tile without pooling: a layer has few KV heads, and one prompt must fill the device."""
ROW_BLOCK = 32
"""Rows with ``KEY_BLOCK`` keys; half as many with a larger tile, so that weights fit into registers."""
WIDE = 128
"""Columns. For wider rows an sm_89's shared memory holds one tile of queries less."""
LATENT_BLOCKS = {"BLOCK_D": 512, "BLOCK_ROT": 64}
"""Blocks of columns of latents, whose keys would else be padded to 1,024."""


@triton.jit
def _load_keys(k_ptr, row, m_n, o_d, D: tl.constexpr):
    """Columns ``o_d`` of the keys ``row`` [BLOCK_N] of a buffer: [columns, BLOCK_N]."""
    p_k = k_ptr + row[None, :] * D + o_d[:, None]
    return tl.load(p_k, mask=m_n[None, :] & (o_d < D)[:, None], other=0.0)


@triton.jit(
    do_not_specialize=["num_keys", "first_key", "num_queries"],
    do_not_specialize_on_alignment=["lse_ptr", "token_slots_ptr", "scores_ptr", "pooled_ptr"],
)
def _key_scores_kernel(
    q_ptr,  # [num_queries, H * G, D]
    lse_ptr,  # [num_queries, H * G] float32
    k_ptr,  # [T, H, D]
    token_slots_ptr,  # [N] int64
    scores_ptr,  # [H, N] float32
    pooled_ptr,  # [H, N] float32, written if KERNEL > 1
    num_keys,
    first_key,  # position of key 0 relative to query 0
    sm_scale,
    norm,  # factor of the sums
    num_queries,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    LOG2_E: tl.constexpr,
    KERNEL: tl.constexpr,  # pooling window, 1 = no pooling by rows
    NUM_DOUBLINGS: tl.constexpr,  # ceil(log2(KERNEL))
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,  # at least D, unless BLOCK_ROT holds the rest
    BLOCK_ROT: tl.constexpr,  # 0: all columns are in BLOCK_D
    POWER: tl.constexpr,  # of the weights that are summed, 1 or 2
    UPCAST: tl.constexpr,  # float32 products: the interpreter cannot multiply bfloat16
):
    HALO: tl.constexpr = KERNEL // 2
    VALID: tl.constexpr = BLOCK_N - 2 * HALO
    i_h = tl.program_id(1)
    o_tile = tl.arange(0, BLOCK_N)
    begin = tl.program_id(0) * VALID - HALO
    n = begin + o_tile  # [BLOCK_N] key of each column, halo included
    m_n = (n >= 0) & (n < num_keys)
    o_d = tl.arange(0, BLOCK_D)
    slot = tl.load(token_slots_ptr + n, mask=m_n, other=0)
    product_type = tl.float32 if UPCAST else q_ptr.dtype.element_ty
    b_k = _load_keys(k_ptr, slot * H + i_h, m_n, o_d, D=D).to(product_type)
    if BLOCK_ROT > 0:
        o_rot = BLOCK_D + tl.arange(0, BLOCK_ROT)
        b_k_rot = _load_keys(k_ptr, slot * H + i_h, m_n, o_rot, D=D).to(product_type)
    acc = tl.zeros([BLOCK_N], dtype=tl.float32)
    pooled = tl.zeros([BLOCK_N], dtype=tl.float32)
    # Earlier queries see none of the tile's keys.
    first_query = tl.maximum(first_key + tl.maximum(begin, 0), 0)
    for start in range(first_query * G, num_queries * G, BLOCK_R):
        row = start + tl.arange(0, BLOCK_R)
        m_r = row < num_queries * G
        i = row // G
        q_row = i.to(tl.int64) * (H * G) + i_h * G + row % G
        b_q = load_rows(q_ptr, q_row * D, m_r, o_d, D=D, UPCAST=UPCAST)  # [BLOCK_R, BLOCK_D]
        b_lse = tl.load(lse_ptr + q_row, mask=m_r, other=0.0)
        s = tl.dot(b_q, b_k, input_precision="ieee")
        if BLOCK_ROT > 0:
            b_q_rot = load_rows(q_ptr, q_row * D, m_r, o_rot, D=D, UPCAST=UPCAST)
            s = tl.dot(b_q_rot, b_k_rot, s, input_precision="ieee")
        s = sm_scale * s - b_lse[:, None]
        seen = m_r[:, None] & m_n[None, :] & (first_key + n[None, :] <= i[:, None])
        p = tl.exp2(tl.where(seen, s * LOG2_E, float("-inf")))  # [BLOCK_R, BLOCK_N]; 0 for unseen keys
        if POWER == 2:
            acc += tl.sum(p * p, 0)
        else:
            acc += tl.sum(p, 0)
        if KERNEL > 1:
            # Each doubling joins two windows of the same width, the last one an overlap: log2(KERNEL) steps instead of
            # KERNEL.
            for j in tl.static_range(NUM_DOUBLINGS):
                shifted = tl.minimum(o_tile + min(2**j, KERNEL - 2**j), BLOCK_N - 1)
                p = tl.maximum(p, tl.gather(p, tl.broadcast_to(shifted[None, :], (BLOCK_R, BLOCK_N)), 1))
            pooled += tl.sum(p, 0)
    out = i_h.to(tl.int64) * num_keys
    m_out = m_n & (o_tile >= HALO) & (o_tile < HALO + VALID)
    tl.store(scores_ptr + out + n, acc * norm, mask=m_out)
    if KERNEL > 1:  # column j holds the window that starts at n[j], so its centre is n[j] + HALO
        m_pooled = (o_tile < VALID) & (n + HALO < num_keys)
        tl.store(pooled_ptr + out + n + HALO, pooled * norm, mask=m_pooled)


def tile_of(kernel_size: int, head_dim: int) -> dict[str, int]:
    """Block sizes and launch options of the kernel, by the pooling window of the rows (1: none) and head_dim."""
    if head_dim > MAX_HEAD_DIM:
        is_plain = kernel_size == 1
        keys = LATENT_KEYS // 2 if is_plain else LATENT_KEYS
        return {"BLOCK_R": 16, "BLOCK_N": keys, "num_warps": 4, "num_stages": 3 if is_plain else 1}
    if kernel_size == 1:
        return {"BLOCK_R": PLAIN_BLOCK, "BLOCK_N": PLAIN_BLOCK, "num_warps": 4, "num_stages": 3}
    keys = max(KEY_BLOCK, 1 << (kernel_size + MIN_VALID_KEYS - 1).bit_length())
    larger = keys // KEY_BLOCK
    stages = 3 if head_dim <= WIDE else 2
    return {"BLOCK_R": ROW_BLOCK // larger, "BLOCK_N": keys, "num_warps": 4 * larger, "num_stages": stages}


def key_scores_triton(
    queries: Tensor,
    lse: Tensor,
    k_buffer: Tensor,
    token_slots: Tensor,
    sm_scale: float,
    first_key: int,
    reduction: str,
    kernel_size: int = 1,
) -> tuple[Tensor, Tensor | None]:
    """Device path of :mod:`kvevict_kernels.key_scores`: one launch, K read once; arguments as for the CPU path.

    Queries of another dtype than the keys are converted to the keys', unless these are float8: attention reads the keys
    with queries converted in the same way.
    """
    if k_buffer.dtype != FP8:
        queries = queries.to(k_buffer.dtype)
    num_queries, num_qo_heads, head_dim = queries.shape
    num_kv_heads, num_keys = k_buffer.shape[1], token_slots.numel()
    group_size = num_qo_heads // num_kv_heads
    scores = torch.empty(num_kv_heads, num_keys, dtype=torch.float32, device=queries.device)
    pooled = torch.empty_like(scores) if kernel_size > 1 else None
    tile = tile_of(kernel_size, head_dim)
    narrow = {"BLOCK_D": max(16, triton.next_power_of_2(head_dim)), "BLOCK_ROT": 0}
    blocks = LATENT_BLOCKS if head_dim > MAX_HEAD_DIM else narrow
    grid = (triton.cdiv(num_keys, tile["BLOCK_N"] - (kernel_size - 1)), num_kv_heads)
    norms = {"sum": 1 / group_size, "mean": 1 / (num_queries * group_size)}
    _key_scores_kernel[grid](
        *(queries, lse, k_buffer, token_slots, scores, scores if pooled is None else pooled),
        *(num_keys, first_key, sm_scale, norms.get(reduction, 1.0), num_queries),
        H=num_kv_heads,
        G=group_size,
        D=head_dim,
        LOG2_E=LOG2_E,
        KERNEL=kernel_size,
        NUM_DOUBLINGS=(kernel_size - 1).bit_length(),
        **blocks,
        POWER=POWERS[reduction],
        UPCAST=not queries.is_cuda,
        **tile,
    )
    return scores, pooled
