"""Spans of 4 bits in every implementation, beside attention to the decoded rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers.captured_decode import Captured
from helpers.tolerance import FLOAT32_NOISE, assert_accurate
from kvevict_kernels.ragged_decode.host_lists import SPLIT_ROWS
from kvevict_kernels.row_sizes import WIDTHS
from kvevict_kernels.span_runs import SpanRuns
from sgl_kvevict.attention.cpu.long_prefill import WINDOW_BLOCK
from sgl_kvevict.attention.cpu.numba_attention import MAX_SHORT_TOKENS, NumbaAttention
from sgl_kvevict.attention.cpu.torch_attention import TorchAttention
from sgl_kvevict.attention.flashinfer.attention import FlashInferAttention
from sgl_kvevict.attention.interface import Attention
from sgl_kvevict.attention.triton.attention import TritonAttention
from sgl_kvevict.errors import InvariantError

NOISE = 8 * FLOAT32_NOISE
"""Two float32 softmaxes over a few hundred keys."""
LONG_NOISE = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
"""Long prefills on a CPU: keys, values and both halves of the result are rounded to the dtype."""
LONG_LSE_NOISE = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
POOLS = [
    *((head_dim, torch.float16) for head_dim in (32, 64, 96, 128)),
    *((head_dim, torch.bfloat16) for head_dim in (64, 128)),
]
"""head_dim and dtype."""


def long_noises(attention: Attention, world) -> tuple[float, float]:
    """Of out and lse, where some prefills are long."""
    return (
        (LONG_NOISE[world.dtype], LONG_LSE_NOISE[world.dtype])
        if isinstance(attention, NumbaAttention)
        else (NOISE, NOISE)
    )


def both_widths(world, longest: int, start: int = 0) -> tuple[SpanRuns, SpanRuns]:
    """The spans of a segment some of whose entries have 16 bits, and others 4."""
    wide = world.uneven_span(longest, start)
    return wide, world.uneven_span(longest, start, bits=4)


def mixed_requests(world) -> None:
    """Paths of several widths that share spans, one width alone, only empty runs, and none."""
    full = world.uneven_span(30)
    end = full.num_tokens
    shared = both_widths(world, 40, end)
    deep = both_widths(world, 17, end + shared[0].num_tokens)
    empty = world.span(torch.zeros_like(full.lens), num_tokens=2, bits=4)
    world.add((full, *shared, *deep), 9)
    world.add((full, *shared), 20)
    world.add((full, *shared, *deep), 1)
    world.add((world.uneven_span(70, bits=4),), 12)
    world.add((world.uneven_span(33, bits=4),), 1)
    world.add((empty,), 1)
    world.add((), 7)


@pytest.mark.parametrize("pool", POOLS, ids=str)
def test_decode_of_4_bits(build, make_world, pool):
    """Alone, shared by requests at different depths, more entries than a block of keys, and none."""
    head_dim, dtype = pool
    world = make_world(2, 3, head_dim, dtype=dtype, num_token_slots=700).learn()
    shared = world.uneven_span(90, bits=4)
    world.add((shared,), 9)
    world.add((world.uneven_span(20, bits=4), shared), 1)
    world.add((world.span(torch.zeros_like(shared.lens), num_tokens=3, bits=4),), 4)
    world.check(build(world))


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [((3, 3, 64), torch.bfloat16), ((1, 4, 128), torch.float16), ((2, 1, 32), torch.float16)],
    ids=str,
)
def test_decode_of_mixed_paths(build, make_world, sizes, dtype):
    world = make_world(*sizes, dtype=dtype, num_token_slots=900).learn()
    mixed_requests(world)
    attention = build(world)
    world.check(attention)
    for i in range(len(world.paths)):
        world.grow(i, 3)
    world.check(attention)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_prefills_of_mixed_paths(build, make_world, dtype):
    """Few new tokens, many, and one, over spans that they share."""
    world = make_world(2, 4, 32, dtype=dtype, num_token_slots=2500).learn()
    attention = build(world)
    is_triton = isinstance(attention, TritonAttention)
    many = SPLIT_ROWS // 4 + 5 if is_triton else MAX_SHORT_TOKENS + 5
    full = world.uneven_span(30)
    path = (full, *both_widths(world, 60, full.num_tokens))
    news = [1, 7, many, 33, 2, many + 9]
    for new in news[:4]:
        world.add(path, new + 3)
    world.add((world.uneven_span(50, bits=4),), 5)
    world.add((), many + 20)
    world.check(attention, news, *long_noises(attention, world))


@pytest.mark.parametrize("bits", WIDTHS)
def test_prefills_over_rows_of_one_width(build, make_world, bits):
    """Of few and of many new tokens, over one shared span; spans of other widths are nowhere."""
    world = make_world(2, 3, 64, dtype=torch.float16, num_token_slots=1200).learn()
    attention, shared = build(world), world.uneven_span(90, bits=bits)
    is_triton = isinstance(attention, TritonAttention)
    news = [3, SPLIT_ROWS // 3 + 5 if is_triton else MAX_SHORT_TOKENS + 5, 1]
    for new in news:
        world.add((shared,), new + 2)
    world.check(attention, news, *long_noises(attention, world))


def test_many_readers_of_wide_rows(build, make_world):
    """More than the rows of a tile share a span; with a head_dim of 256 a tile has fewer."""
    world = make_world(2, 4, 256, dtype=torch.float16, num_layers=1, num_token_slots=300).learn()
    path = both_widths(world, 40)
    for own in range(1, 11):
        world.add(path, own)
    world.check(build(world))


@pytest.mark.parametrize(("is_extend", "has_sinks"), [(False, False), (False, True), (True, True)], ids=str)
def test_windows_and_sinks(build, make_world, *, is_extend, has_sinks):
    """Into spans of both widths, into none of them, and past all of them."""
    world = make_world(2, 2, 32, dtype=torch.float16, windows=(0, 1, 9, 40), num_token_slots=2500).learn()
    world.sink_logits = torch.randn(4) + 1 if has_sinks else None
    attention = build(world)
    mixed_requests(world)
    news = None
    if is_extend:
        is_triton = isinstance(attention, TritonAttention)
        many = SPLIT_ROWS // 2 + 1 if is_triton else MAX_SHORT_TOKENS + WINDOW_BLOCK
        news = [3, many, 1, 5, 1, 1, 7]
        world.grow(1, many)
    world.check(attention, news, *(long_noises(attention, world) if is_extend else (NOISE, NOISE)))


def test_a_span_that_only_one_layer_and_head_has(build, make_world):
    """As many rows of a width as one head slot holds, and one more; statistics are of the run's layer and head."""
    world = make_world(3, 2, 64, dtype=torch.float16, num_token_slots=100).learn()
    for count in (1, 2, 4, 5, 8, 9):
        lens = torch.zeros(2, 3, dtype=torch.int32)
        lens[1, 2] = count
        world.add((world.span(lens, num_tokens=9, bits=4),), 2)
    world.check(build(world))


def test_chunks_of_a_long_span(build, make_world):
    """More entries than one partial result has, on one KV head, beside short ones."""
    world = make_world(2, 4, 32, dtype=torch.float16, num_layers=1, num_token_slots=1200).learn()
    long = [world.span(torch.tensor([[700, 3]]), num_tokens=800, bits=bits) for bits in WIDTHS]
    for span in long:
        world.add((span,), 5)
        world.add((span,), 70)
    world.check(build(world))


@pytest.mark.parametrize("windows", [(0, 0), (25, 0)], ids=["", "window"])
def test_trees_of_drafts(build, make_world, windows):
    """Every node sees the spans; the tree hides only its own branches."""
    world = make_world(2, 2, 32, dtype=torch.float16, windows=windows, num_token_slots=900).learn()
    mixed_requests(world)
    bits_of_tree = [0b1, 0b11, 0b101, 0b1011]  # the root, two children of it, and a child of the first
    for i in range(len(world.paths)):
        world.grow(i, 4)
    batch = replace(world.batch([4] * 7), visible=torch.tensor(bits_of_tree * 7))
    attention, plain = build(world), TorchAttention(world.geometry, world.k, world.v, world.coding)
    for implementation in (attention, plain):
        implementation.plan(batch)
    for layer in range(2):
        q = world.queries([4] * 7)
        got, baseline = (each.run(layer, q, world.sm_scale) for each in (attention, plain))
        want = plain.run(layer, q.float(), world.sm_scale)
        for name, x, expected, rounded in zip(("out", "lse"), got, want, baseline, strict=True):
            assert_accurate(name, x, expected, rounded, noise=NOISE)


@pytest.mark.usefixtures("interpreted", "small_chunks")
@pytest.mark.filterwarnings("ignore:All-NaN")  # requests that only fill up read slot 0
@pytest.mark.parametrize("windows", [(0,), (30,)], ids=["", "window"])
def test_a_captured_step_follows_spans_of_other_widths(make_world, windows):
    """Recorded launches read the width of a span from each replay's tables."""
    world = make_world(2, 2, 32, dtype=torch.float16, windows=windows, num_token_slots=900).learn()
    captured = Captured(world, 7, "cpu")
    mixed_requests(world)
    for _ in range(3):
        captured.check()
        world.remove(2)
        world.remove(0)
        if len(world.paths) < 4:
            world.add((world.uneven_span(40, bits=4),), 3)


def test_a_row_outside_of_the_pool_is_reported(make_world):
    world = make_world(2, 2, 32).learn()
    span = world.span(torch.full((2, 2), 9), num_tokens=9, bits=4)
    world.add((span,), 2)
    attention = NumbaAttention(world.geometry, world.k, world.v, world.coding)
    attention.plan(world.batch())
    span.rows[20] = 4 * world.geometry.num_head_slots
    with pytest.raises(IndexError, match=f"head slot {world.geometry.num_head_slots}: the arena has"):
        attention.run(1, world.queries(), world.sm_scale)


def test_spans_of_4_bits_need_a_coding(build, make_world):
    world = make_world(2, 2, 32).learn()
    span = world.uneven_span(10, bits=4)
    world.add((span,), 3)
    world.coding = None
    attention = build(world)
    with pytest.raises(InvariantError, match="a span has rows of 4 bits, which this attention was not built to read"):
        attention.plan(world.batch())


@pytest.mark.usefixtures("flashinfer_plans")
def test_flashinfer_reads_rows_of_16_bits_only(make_world):
    world = make_world(2, 2, 64).learn()
    world.add((world.uneven_span(10), world.uneven_span(10, bits=4)), 3)
    attention = FlashInferAttention(world.geometry, world.k, world.v)
    with pytest.raises(InvariantError, match="a span has rows of 4 bits"):
        attention.plan(world.batch())
