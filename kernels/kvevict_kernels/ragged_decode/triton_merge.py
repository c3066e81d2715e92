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
from kvevict_kernels.ragged_decode.triton_items import suffix_chunk

MERGE_VALUES = 4096
"""Numbers of partials merged at once, in shared memory: 16 KB, so that it bounds no resident programs."""
MERGE_BLOCK = 32
"""Partials merged at once, at most: as many as one request's run has, so that loads wait once or twice."""
MERGE_RUNS = 16
"""Runs of a row whose partials are found at once: those of a path of up to 15 spans, and its suffix."""


@triton.jit
def _places_of_runs(
    begin, num_spans, path_begin, first_span, head, q_place, token, num_suffix, suffix_place, suffix_stride,
    addresses_ptr, H: tl.constexpr, G: tl.constexpr, RUNS: tl.constexpr,
):  # fmt: skip
    """Partials of a row in some runs of its path, numbered through; the suffix is the run behind the last span.

    Returns:
        number of partials of all these runs, and, [RUNS] each: the first number of each run, the number behind its
        last, the partial row that number 0 would have if it were the run's, and rows from one number to the next.
        Partial rows fit 32 bits (``triton_items.py``).
    """
    o = begin + tl.arange(0, RUNS)
    is_span = o < num_spans
    span = tl.load(at.int32s_at(addresses_ptr, at.PATH_SPAN) + path_begin + o, mask=is_span, other=0)
    member = tl.load(at.int32s_at(addresses_ptr, at.PATH_MEMBER) + path_begin + o, mask=is_span, other=0)
    stride = tl.load(at.int32s_at(addresses_ptr, at.SPAN_MEMBERS) + span, mask=is_span, other=0) * G
    unit = (first_span + span) * H + head
    num = tl.load(at.int32s_at(addresses_ptr, at.RUN_CHUNKS) + unit, mask=is_span, other=0)
    first = tl.load(at.int64s_at(addresses_ptr, at.PARTIAL_START) + unit, mask=is_span, other=0)
    place = first.to(tl.int32) + (member + token) * G + q_place
    num = tl.where(o == num_spans, num_suffix, num)
    end = tl.cumsum(num, 0)
    stride = tl.where(is_span, stride, suffix_stride)
    return tl.sum(num, 0), end - num, end, tl.where(is_span, place, suffix_place) - (end - num) * stride, stride


@triton.jit
def _fold(
    b_max, b_sum, b_out, part_ptr, part_lse_ptr, total, start, end, base, stride, o_d, D: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the partials of some runs to a running softmax: run after run, block by block, in a fixed order.

    A block may hold partials of several runs. It is copied to shared memory, so that all of it is on its way at once:
    of loads into registers the compiler keeps only a few. Behind the last partial that one is read again.
    """
    for begin in tl.range(0, total, BLOCK, num_stages=2):
        o = begin + tl.arange(0, BLOCK)
        number = tl.minimum(o, total - 1)[:, None]
        is_of_run = (number >= start[None, :]) & (number < end[None, :])
        row = tl.sum(tl.where(is_of_run, base[None, :] + number * stride[None, :], 0), 1).to(tl.int64)
        b_lse = tl.where(o < total, tl.load(part_lse_ptr + row), float("-inf"))
        p_part = part_ptr + row[:, None] * D + o_d[None, :]
        b_part = tl.load(p_part) if o_d.shape[0] == D else tl.load(p_part, mask=(o_d < D)[None, :], other=0.0)
        new_max = tl.maximum(b_max, tl.max(b_lse, 0))
        finite = tl.where(new_max == float("-inf"), 0.0, new_max)
        weight = tl.exp2(b_lse - finite)
        decay = tl.exp2(b_max - finite)
        b_sum = b_sum * decay + tl.sum(weight, 0)
        b_out = b_out * decay + tl.sum(b_part * weight[:, None], 0)
        b_max = new_max
    return b_max, b_sum, b_out


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
    RUNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per (new token, q head): its path from the root on, then its suffix, then the sink logit.

    With ``PDL`` it starts beside the split kernel before it, which was launched when all tables were complete. Where
    the partials of the first ``RUNS`` runs lie is known before it waits for them, so that one load follows the wait.
    """
    request = tl.load(at.int32s_at(addresses_ptr, at.MERGE_REQUEST) + tl.program_id(0))
    token = tl.load(at.int32s_at(addresses_ptr, at.MERGE_TOKEN) + tl.program_id(0))
    q_head = tl.program_id(1)
    head, q_place = q_head // G, q_head % G
    p_path = at.int32s_at(addresses_ptr, at.PATH_START) + request
    path_begin = tl.load(p_path)
    num_spans = tl.load(p_path + 1) - path_begin
    first_span = layer * tl.load(addresses_ptr + at.NUM_SPANS).to(tl.int32)
    rows = tl.load(at.int32s_at(addresses_ptr, at.NEW_LENS_DEVICE) + request) * G
    length = tl.load(seq_lens_ptr + request) - tl.load(at.int32s_at(addresses_ptr, at.COMPRESSED_LENS) + request)
    least = tl.load(at.int32s_at(addresses_ptr, at.REQUEST_CHUNK) + request)
    num_suffix = tl.cdiv(length, suffix_chunk(length, least, H=H, NUM_ITEMS=NUM_ITEMS, STEP=STEP))
    suffix_place = tl.load(at.int64s_at(addresses_ptr, at.SUFFIX_PARTIAL) + request).to(tl.int32)
    suffix_place += head * rows + token * G + q_place
    member = tl.load(at.int32s_at(addresses_ptr, at.REQUEST_MEMBERS) + request) + token
    row = tl.load(at.int32s_at(addresses_ptr, at.MEMBERS) + member).to(tl.int64) * (H * G) + q_head
    part_ptr, part_lse_ptr = at.floats_at(addresses_ptr, at.PARTIAL_OUT), at.floats_at(addresses_ptr, at.PARTIAL_LSE)
    o_d = tl.arange(0, BLOCK_D)
    b_max = tl.full([], float("-inf"), dtype=tl.float32)
    b_sum = tl.zeros([], dtype=tl.float32)
    b_out = tl.zeros([BLOCK_D], dtype=tl.float32)
    # Counted here, where all parts of a row's softmax meet: once.
    if sink_logits_ptr is not None:  # without a value
        b_max = 1.4426950408889634 * tl.load(sink_logits_ptr + q_head).to(tl.float32)
        b_sum = tl.where(b_max == float("-inf"), 0.0, 1.0)
    for begin in range(0, num_spans + 1, RUNS):
        total, start, end, base, stride = _places_of_runs(
            begin, num_spans, path_begin, first_span, head, q_place, token, num_suffix, suffix_place, rows * H,
            addresses_ptr, H=H, G=G, RUNS=RUNS,
        )  # fmt: skip
        if PDL:
            gdc_wait()  # from the second time on it does nothing
        b_max, b_sum, b_out = _fold(
            b_max, b_sum, b_out, part_ptr, part_lse_ptr, total, start, end, base, stride, o_d, D=DV, BLOCK=BLOCK
        )
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
        RUNS=MERGE_RUNS,
        **dependent_launch(out.device),
    )
