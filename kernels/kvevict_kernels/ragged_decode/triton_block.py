"""Blocks of keys for decode and extend: load q rows, attend to one block, hide keys before a window."""

from __future__ import annotations

import triton
import triton.language as tl

from kvevict_kernels.triton_rows import load_narrow, load_steps, reads_in_place

LOG2_E = 1.4426950408889634
_MIN_COLUMNS = tl.constexpr(16)
"""Of a product."""
_WARP_KEYS = tl.constexpr(32)
"""Keys that four warps multiply at once."""


@triton.jit
def load_rows(q_ptr, row, m_m, o_d, D: tl.constexpr, UPCAST: tl.constexpr):
    """Q rows [BLOCK_M, BLOCK_D] that begin at ``row`` (elements); float32 in the interpreter."""
    b_q = tl.load(q_ptr + row[:, None] + o_d[None, :], mask=m_m[:, None] & (o_d < D)[None, :], other=0.0)
    if UPCAST:
        b_q = b_q.to(tl.float32)
    return b_q


@triton.jit
def load_queries(
    q_ptr, row, m_m, o_d, D: tl.constexpr, DV: tl.constexpr, BLOCK_ROT: tl.constexpr, UPCAST: tl.constexpr
):  # fmt: skip
    """Q rows that begin at ``row``, in two parts: [BLOCK_M, BLOCK_D], then [BLOCK_M, BLOCK_ROT] of latents."""
    b_q = load_rows(q_ptr, row, m_m, o_d, D=DV, UPCAST=UPCAST)
    b_rot = b_q
    if BLOCK_ROT > 0:
        b_rot = load_rows(q_ptr, row + DV, m_m, tl.arange(0, BLOCK_ROT), D=D - DV, UPCAST=UPCAST)
    return b_q, b_rot


@triton.jit
def attend_block(
    b_q,  # [BLOCK_M, BLOCK_D]
    b_rot,  # [BLOCK_M, BLOCK_ROT] of latents, else not read
    b_max,  # [BLOCK_M] base 2
    b_sum,  # [BLOCK_M]
    b_out,  # [BLOCK_M, BLOCK_D] float32
    k_ptr,  # [X, D]
    v_ptr,  # [X, D]
    head_slot,  # [BLOCK_N] int64
    m_n,  # [BLOCK_N] real keys
    seen,  # [BLOCK_M, BLOCK_N]
    o_d,
    scale_log2,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_ROT: tl.constexpr,
):
    """One block of keys, online softmax; a row may see none of them. float8 rows are multiplied in q's dtype.

    Of latents (``BLOCK_ROT`` > 0) the first ``DV`` columns of a key are loaded once, and are its value.
    """
    p_kv = head_slot[:, None] * D + o_d[None, :]
    m_kv = m_n[:, None] & (o_d < DV)[None, :]
    b_k = tl.load(k_ptr + p_kv, mask=m_kv, other=0.0)
    if BLOCK_ROT > 0:
        o_r = tl.arange(0, BLOCK_ROT)
        p_rot = head_slot[:, None] * D + DV + o_r[None, :]
        b_key_rot = tl.load(k_ptr + p_rot, mask=m_n[:, None] & (o_r < D - DV)[None, :], other=0.0).to(b_q.dtype)
        b_k = b_k.to(b_q.dtype)
        b_v = b_k
        s = tl.dot(b_rot, tl.trans(b_key_rot), input_precision="ieee")
        s = scale_log2 * tl.dot(b_q, tl.trans(b_k), s, input_precision="ieee")
    else:
        b_v = tl.load(v_ptr + p_kv, mask=m_kv, other=0.0)
        b_k = b_k.to(b_q.dtype)
        b_v = b_v.to(b_q.dtype)
        s = scale_log2 * tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
    s = tl.where(seen, s, float("-inf"))
    new_max = tl.maximum(b_max, tl.max(s, 1))
    # A row may have seen no key yet, and the difference of two infinities is NaN.
    base = tl.where(new_max == float("-inf"), 0.0, new_max)
    p = tl.exp2(s - base[:, None])
    decay = tl.exp2(b_max - base)
    b_sum = b_sum * decay + tl.sum(p, 1)
    b_out = tl.dot(p.to(b_v.dtype), b_v, b_out * decay[:, None], input_precision="ieee")
    return new_max, b_sum, b_out


@triton.jit
def narrow_sums(BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """What :func:`add_narrow_block` adds to, before the first block of rows of 4 bits.

    Returns:
        [BLOCK_M], maxima (base 2), finite; [BLOCK_M, parts], parts of the sums of weights; [BLOCK_M, MIN_COLUMNS], in
        every column, sums of weights times the steps of values; [BLOCK_M, BLOCK_D], weighted sums of values as read.
    """
    # Warps of a tile of few q rows have keys of their own. To add up theirs in each block takes many instructions.
    b_sum = tl.zeros([BLOCK_M, min(BLOCK_N, _WARP_KEYS) if reads_in_place(BLOCK_M) else 1], dtype=tl.float32)
    b_weight = tl.zeros([BLOCK_M, _MIN_COLUMNS], dtype=tl.float32)
    # Finite: a row that has seen no key yet would have the difference of two infinities, NaN.
    b_max = tl.full([BLOCK_M], -3.0e38, dtype=tl.float32)
    return b_max, b_sum, b_weight, tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)


@triton.jit
def score_narrow_block(b_q, b_zero, k_ptr, k_steps_ptr, number, ones, D: tl.constexpr):
    """Scores (base 2) [BLOCK_M, BLOCK_N] of turned queries and rows of 4 bits with these numbers, [BLOCK_N].

    ``b_q`` and ``b_zero`` are of :func:`kvevict_kernels.triton_rows.turned_queries`, ``ones`` is :func:`ones_of`.
    """
    BLOCK_M: tl.constexpr = b_q.shape[0]
    BLOCK_N: tl.constexpr = number.shape[0]
    b_k = load_narrow(k_ptr, number, ones, D, BLOCK_N, b_q.shape[1], False, reads_in_place(BLOCK_M)).to(b_q.dtype)
    s = tl.broadcast_to(b_zero[:, None], (BLOCK_M, BLOCK_N))
    return tl.dot(b_q, tl.trans(b_k), s, input_precision="ieee") * load_steps(k_steps_ptr, number)[None, :]


@triton.jit
def add_narrow_block(
    b_max, b_sum, b_weight, b_out, s, v_ptr, v_steps_ptr, number, ones, dtype: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """Add one block of scores to the sums, multiplied in ``dtype``; a row may see none of the keys."""
    BLOCK_N: tl.constexpr = number.shape[0]
    b_v = load_narrow(v_ptr, number, ones, D, BLOCK_N, b_out.shape[1], True, False).to(dtype)
    new_max = tl.maximum(b_max, tl.max(s, 1))
    p = tl.exp2(s - new_max[:, None])
    decay = tl.exp2(b_max - new_max)[:, None]
    PARTS: tl.constexpr = b_sum.shape[1]
    b_sum = b_sum * decay + tl.sum(tl.reshape(p, (p.shape[0], BLOCK_N // PARTS, PARTS)), 1)
    p = (p * load_steps(v_steps_ptr, number)[None, :]).to(dtype)
    # The sum of the weights as they are multiplied, by the same unit: else what is read for 0 would not give 0.
    units = tl.full([BLOCK_N, _MIN_COLUMNS], 1.0, dtype=dtype)
    b_weight = tl.dot(p, units, b_weight * decay, input_precision="ieee")
    return new_max, b_sum, b_weight, tl.dot(p, b_v, b_out * decay, input_precision="ieee")


@triton.jit
def hidden_keys(position_ptr, num_kv, is_span, hidden, m_m):
    """Whether a window hides keys of a run, or of a part of one, from a tile of rows.

    ``position_ptr`` has the ascending positions of its ``num_kv`` entries (may be 0); a suffix (not ``is_span``) has
    none. ``hidden`` [BLOCK_M] is the last position that each row does not see; ``m_m`` [BLOCK_M] marks real rows.

    Returns:
        whether no row sees any of them, and whether some row does not see all of them.
    """
    is_run = is_span & (num_kv > 0)
    last = tl.load(position_ptr + num_kv - 1, mask=is_run, other=2147483647)
    first = tl.load(position_ptr, mask=is_run, other=2147483647)
    return last <= tl.min(tl.where(m_m, hidden, 2147483646), 0), first <= tl.max(tl.where(m_m, hidden, -2147483647), 0)


@triton.jit
def load_tree(visible_ptr, row, token, m_m):
    """Tokens of its tree that each token [BLOCK_M] sees (bits), and its depth; in a chain the depth is ``token``."""
    visible, depth = token, token
    if visible_ptr is not None:
        visible = tl.load(visible_ptr + row, mask=m_m, other=-1)
        pairs = visible - ((visible >> 1) & 0x5555555555555555)
        fours = (pairs & 0x3333333333333333) + ((pairs >> 2) & 0x3333333333333333)
        eights = (fours + (fours >> 4)) & 0x0F0F0F0F0F0F0F0F
        depth = ((eights * 0x0101010101010101) >> 56).to(tl.int32) - 1  # the sum of all bits but its own
    return visible, depth


@triton.jit
def hide_branches(seen, visible_ptr, visible, place, is_span):
    """``seen`` [BLOCK_M, BLOCK_N] without the nodes of other branches, unless the keys are a span's.

    ``place`` [BLOCK_N] is a key's place among the new tokens, negative before them.
    """
    if visible_ptr is not None:
        # A shift by more bits than there are is undefined.
        shift = tl.minimum(tl.maximum(place, 0), 63).to(tl.int64)
        is_before = is_span | (place < 0)
        seen = seen & (is_before[None, :] | (((visible[:, None] >> shift[None, :]) & 1) != 0))
    return seen
