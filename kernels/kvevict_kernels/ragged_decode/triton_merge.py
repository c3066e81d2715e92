"""Merge of the partials of ``ragged_decode``: one softmax over a row's path and suffix."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from kvevict_kernels.device_limits import dependent_launch
from kvevict_kernels.ragged_decode import chunks
from kvevict_kernels.ragged_decode import triton_addresses as at
from kvevict_kernels.ragged_decode.addresses import TableAddresses
from kvevict_kernels.ragged_decode.tables import LayerInputs, Step
from kvevict_kernels.ragged_decode.tile_table import block_widths
from kvevict_kernels.ragged_decode.triton_chunks import run_chunk, suffix_chunk

MERGE_VALUES = 8192
"""Numbers of partials merged at once, in registers."""
MERGE_BLOCK = 32
"""Partials merged at once, at most: as many as one request's run has, so that loads wait once or twice."""


@triton.jit
def fold(b_max, b_sum, b_out, out_ptr, lse_ptr, first, num, stride, o_d, D: tl.constexpr, BLOCK: tl.constexpr):
    """Add ``num`` partials, ``stride`` rows apart, to a running softmax, block by block in a fixed order."""
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


@triton.jit
def with_sink(b_max, b_sum, sink):
    """Add a logit, base 2, to a running softmax; also returns the factor of the output so far."""
    new_max = tl.maximum(b_max, sink)
    base = tl.where(new_max == float("-inf"), 0.0, new_max)
    decay = tl.exp2(b_max - base)
    return new_max, b_sum * decay + tl.exp2(sink - base), decay


@triton.jit(do_not_specialize=["layer"], do_not_specialize_on_alignment=["seq_lens_ptr", "sink_logits_ptr"])
def _merge_kernel(
    addresses_ptr,
    out_ptr,  # [N, H * G, DV]
    lse_ptr,  # [N, H * G] float32, natural
    seq_lens_ptr,
    sink_logits_ptr,  # [H * G], or None
    layer,
    v_scale,
    NUM_ITEMS: tl.constexpr,
    STEP: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per (new token, q head): its path from the root on, then its suffix, then the sink logit.

    With ``PDL`` it starts beside the split kernel before it, which was launched when all tables were complete, and
    waits before it reads partials.
    """
    request = tl.load(at.int32s_at(addresses_ptr, at.MERGE_REQUEST) + tl.program_id(0))
    token = tl.load(at.int32s_at(addresses_ptr, at.MERGE_TOKEN) + tl.program_id(0))
    partial_out_ptr = at.floats_at(addresses_ptr, at.PARTIAL_OUT)
    partial_lse_ptr = at.floats_at(addresses_ptr, at.PARTIAL_LSE)
    path_start_ptr = at.int32s_at(addresses_ptr, at.PATH_START)
    first_span = layer * tl.load(addresses_ptr + at.NUM_SPANS).to(tl.int32)
    q_head = tl.program_id(1)
    head = q_head // G
    o_d = tl.arange(0, BLOCK_D)
    b_max = tl.full([], float("-inf"), dtype=tl.float32)
    b_sum = tl.zeros([], dtype=tl.float32)
    b_out = tl.zeros([BLOCK_D], dtype=tl.float32)
    path_begin, path_end = tl.load(path_start_ptr + request), tl.load(path_start_ptr + request + 1)
    if PDL:
        gdc_wait()
    for j in range(path_begin, path_end):
        span = tl.load(at.int32s_at(addresses_ptr, at.PATH_SPAN) + j)
        rows = tl.load(at.int32s_at(addresses_ptr, at.SPAN_MEMBERS) + span) * G
        unit = (first_span + span) * H + head
        length = tl.load(at.int32s_at(addresses_ptr, at.RUN_LENS) + unit)
        chunk = tl.load(at.int32s_at(addresses_ptr, at.SPAN_CHUNK) + span)
        num = tl.cdiv(length, run_chunk(length, chunk, tl.load(at.int32s_at(addresses_ptr, at.SPAN_CAP) + span)))
        member = tl.load(at.int32s_at(addresses_ptr, at.PATH_MEMBER) + j)
        first = tl.load(at.int64s_at(addresses_ptr, at.PARTIAL_START) + unit) + (member + token) * G + q_head % G
        b_max, b_sum, b_out = fold(
            b_max, b_sum, b_out, partial_out_ptr, partial_lse_ptr, first, num, rows, o_d, D=DV, BLOCK=BLOCK
        )
    rows = tl.load(at.int32s_at(addresses_ptr, at.NEW_LENS_DEVICE) + request) * G
    length = tl.load(seq_lens_ptr + request) - tl.load(at.int32s_at(addresses_ptr, at.COMPRESSED_LENS) + request)
    least = tl.load(at.int32s_at(addresses_ptr, at.REQUEST_CHUNK) + request)
    chunk = suffix_chunk(length, least, H=H, NUM_ITEMS=NUM_ITEMS, STEP=STEP)
    num = tl.cdiv(length, chunk)
    first = tl.load(at.int64s_at(addresses_ptr, at.SUFFIX_PARTIAL) + request) + head * rows + token * G + q_head % G
    b_max, b_sum, b_out = fold(
        b_max, b_sum, b_out, partial_out_ptr, partial_lse_ptr, first, num, rows * H, o_d, D=DV, BLOCK=BLOCK
    )
    if sink_logits_ptr is not None:
        sink = 1.4426950408889634 * tl.load(sink_logits_ptr + q_head).to(tl.float32)
        b_max, b_sum, decay = with_sink(b_max, b_sum, sink)
        b_out = b_out * decay
    member = tl.load(at.int32s_at(addresses_ptr, at.REQUEST_MEMBERS) + request) + token
    row = tl.load(at.int32s_at(addresses_ptr, at.MEMBERS) + member).to(tl.int64) * (H * G) + q_head
    divisor = tl.where(b_sum > 0.0, b_sum, 1.0)
    tl.store(out_ptr + row * DV + o_d, b_out / divisor * v_scale, mask=o_d < DV)
    tl.store(lse_ptr + row, (b_max + tl.log2(divisor)) * 0.6931471805599453)


def run_merge(addresses: TableAddresses, step: Step, inputs: LayerInputs, out: Tensor, lse: Tensor) -> None:
    """Write the rows of ``out`` and ``lse`` for which the split kernel attended."""
    num_qo_heads = out.shape[1]
    tables, widths = addresses.tables, block_widths(inputs.q.shape[2], inputs.v_head_dim)
    _merge_kernel[(tables.merge_request.numel(), num_qo_heads)](
        *(addresses.on_device, out, lse, step.seq_lens, inputs.sink_logits, inputs.layer, inputs.v_scale),
        NUM_ITEMS=tables.sizes.num_items,
        STEP=chunks.CHUNK_STEP,
        H=tables.sizes.num_kv_heads,
        G=tables.sizes.group_size,
        DV=widths["DV"],
        BLOCK_D=widths["BLOCK_D"],
        BLOCK=min(MERGE_BLOCK, MERGE_VALUES // widths["BLOCK_D"]),
        **dependent_launch(out.device),
    )
