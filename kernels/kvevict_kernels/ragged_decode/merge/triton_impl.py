"""Merge of the partials of ``ragged_decode``: one softmax over a row's path and suffix."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvevict_kernels.ragged_decode.host_lists import MAX_SPLITS
from kvevict_kernels.ragged_decode.tables import Step, Tables

MERGE_BLOCK = 16


@triton.jit
def suffix_chunk(length, chunk, MAX_SPLITS: tl.constexpr):
    """KV rows per chunk of a suffix: depends on nothing but its own length."""
    return chunk * tl.maximum(tl.cdiv(length, chunk * MAX_SPLITS), 1)


@triton.jit
def _fold(b_max, b_sum, b_out, out_ptr, lse_ptr, first, num, stride, o_d, D: tl.constexpr, BLOCK: tl.constexpr):
    """Add ``num`` partials, ``stride`` rows apart, to a running softmax; blocks of them at once, in a fixed order."""
    for begin in range(0, num, BLOCK):
        o = begin + tl.arange(0, BLOCK)
        mask = o < num
        row = first + o.to(tl.int64) * stride
        b_lse = tl.load(lse_ptr + row, mask=mask, other=float("-inf"))
        b_part = tl.load(out_ptr + row[:, None] * D + o_d[None, :], mask=mask[:, None] & (o_d < D)[None, :], other=0.0)
        new_max = tl.maximum(b_max, tl.max(b_lse, 0))
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
        weight = tl.exp2(b_lse - base)
        decay = tl.exp2(b_max - base)
        b_sum = b_sum * decay + tl.sum(weight, 0)
        b_out = b_out * decay + tl.sum(b_part * weight[:, None], 0)
        b_max = new_max
    return b_max, b_sum, b_out


@triton.jit(do_not_specialize=["layer", "num_spans"])
def _merge_kernel(
    partial_out_ptr,
    partial_lse_ptr,
    out_ptr,  # [N, H * G, D]
    lse_ptr,  # [N, H * G] float32, natural
    merge_request_ptr,
    merge_token_ptr,
    members_ptr,
    request_members_ptr,
    new_lens_ptr,
    waterlines_ptr,
    seq_lens_ptr,
    request_chunk_ptr,
    suffix_partial_ptr,
    path_start_ptr,
    path_span_ptr,
    path_member_ptr,
    span_members_ptr,
    span_chunk_ptr,
    run_lens_ptr,
    partial_start_ptr,
    layer,
    num_spans,
    MAX_SPLITS: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per (new token, q head): its path from the root on, then its suffix."""
    request = tl.load(merge_request_ptr + tl.program_id(0))
    token = tl.load(merge_token_ptr + tl.program_id(0))
    q_head = tl.program_id(1)
    head = q_head // G
    o_d = tl.arange(0, BLOCK_D)
    b_max = tl.full([], float("-inf"), dtype=tl.float32)
    b_sum = tl.zeros([], dtype=tl.float32)
    b_out = tl.zeros([BLOCK_D], dtype=tl.float32)
    for j in range(tl.load(path_start_ptr + request), tl.load(path_start_ptr + request + 1)):
        span = tl.load(path_span_ptr + j)
        rows = tl.load(span_members_ptr + span) * G
        unit = (layer * num_spans + span) * H + head
        num = tl.cdiv(tl.load(run_lens_ptr + unit), tl.load(span_chunk_ptr + span))
        first = tl.load(partial_start_ptr + unit) + (tl.load(path_member_ptr + j) + token) * G + q_head % G
        b_max, b_sum, b_out = _fold(
            b_max, b_sum, b_out, partial_out_ptr, partial_lse_ptr, first, num, rows, o_d, D=D, BLOCK=BLOCK
        )
    rows = tl.load(new_lens_ptr + request) * G
    length = tl.load(seq_lens_ptr + request) - tl.load(waterlines_ptr + request)
    num = tl.cdiv(length, suffix_chunk(length, tl.load(request_chunk_ptr + request), MAX_SPLITS))
    first = tl.load(suffix_partial_ptr + request) + head * rows + token * G + q_head % G
    b_max, b_sum, b_out = _fold(
        b_max, b_sum, b_out, partial_out_ptr, partial_lse_ptr, first, num, rows * H, o_d, D=D, BLOCK=BLOCK
    )
    row = tl.load(members_ptr + tl.load(request_members_ptr + request) + token).to(tl.int64) * (H * G) + q_head
    divisor = tl.where(b_sum > 0.0, b_sum, 1.0)
    tl.store(out_ptr + row * D + o_d, b_out / divisor, mask=o_d < D)
    tl.store(lse_ptr + row, (b_max + tl.log2(divisor)) * 0.6931471805599453)


def run_merge(
    tables: Tables, step: Step, layer: int, partials: tuple[Tensor, Tensor], out: Tensor, lse: Tensor
) -> None:
    """Write the rows of ``out`` and ``lse`` that the split kernel attended for."""
    num_qo_heads, head_dim = out.shape[1:]
    _merge_kernel[(tables.merge_request.numel(), num_qo_heads)](
        *partials,
        out,
        lse,
        tables.merge_request,
        tables.merge_token,
        tables.members,
        tables.request_members,
        tables.new_lens_device,
        tables.waterlines,
        step.seq_lens,
        tables.request_chunk,
        tables.suffix_partial,
        tables.path_start,
        tables.path_span,
        tables.path_member,
        tables.span_members,
        tables.span_chunk,
        tables.run_lens,
        tables.partial_start,
        layer,
        tables.num_spans,
        MAX_SPLITS=MAX_SPLITS,
        H=tables.num_kv_heads,
        G=tables.group_size,
        D=head_dim,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        BLOCK=MERGE_BLOCK,
    )
