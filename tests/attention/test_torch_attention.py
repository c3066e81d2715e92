from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from helpers.poison import poisoned_allocations
from helpers.tolerance import FLOAT32_NOISE, assert_accurate
from kvevict_kernels.span_runs import SpanRuns
from sgl_kvevict.attention import AttentionBatch, TorchAttention
from sgl_kvevict.attention.cpu.torch_decode import TileStep
from sgl_kvevict.attention.cpu.torch_rows import RowStep
from sgl_kvevict.errors import InvariantError

if TYPE_CHECKING:
    from conftest import MakeWorld, World

DTYPES = [torch.bfloat16, torch.float32]
NOISE = 4 * FLOAT32_NOISE
"""Two float32 softmaxes over up to 1,400 keys."""
TWO_ROUNDINGS = {torch.bfloat16: 2.0**-8, torch.float32: NOISE}
"""Several new tokens: both halves are rounded before they are merged, half a unit in the last place each."""
EXTEND_LSE_NOISE = {torch.bfloat16: 1e-4, torch.float32: NOISE}
"""torch's fused attention takes a quick exponential for 16-bit inputs: 6e-5 seen at an lse near 1."""


def check(world: World, extend_lens: list[int] | None = None) -> None:
    """Plan, and compare every layer with the dense reference; fresh allocations are NaN."""
    with poisoned_allocations():
        world.attention.plan(world.batch(extend_lens))
    is_decode = extend_lens is None or max(extend_lens) == 1
    for layer in range(world.geometry.num_layers):
        q = world.queries(extend_lens)
        with poisoned_allocations():
            out, lse = world.attention.run(layer, q, world.sm_scale)
        want_out, want_lse, baseline = world.expected(layer, q, extend_lens)
        assert out.dtype == q.dtype
        assert lse.dtype == torch.float32
        assert_accurate("out", out, want_out, baseline, noise=NOISE if is_decode else TWO_ROUNDINGS[q.dtype])
        lse_noise = NOISE if is_decode else EXTEND_LSE_NOISE[q.dtype]
        assert_accurate("lse", lse, want_lse, want_lse, noise=lse_noise)


SIZES = [(3, 3, 64), (1, 1, 16), (2, 5, 80), (5, 7, 32), (4, 1, 128)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_decode_of_every_kind_of_request(
    make_world: MakeWorld, sizes: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """Nothing compressed; one span; a span shared by three; at other depths; only empty runs; a suffix of one."""
    world = make_world(*sizes, dtype=dtype)
    shared, deep, empty = (
        world.uneven_span(100),
        world.uneven_span(63),
        world.span(torch.zeros(2, sizes[0], dtype=torch.int32), num_tokens=1),
    )
    world.add((), 100)
    world.add((world.uneven_span(150),), 63)
    world.add((shared, deep), 1)
    world.add((empty, world.uneven_span(5), shared), 30)
    world.add((deep, shared), 7)
    world.add((empty,), 1)
    world.add((), 1)
    check(world)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_uncompressed", [1, 63, 64, 65, 100, 1400])
def test_decode_without_spans(make_world: MakeWorld, num_uncompressed: int, dtype: torch.dtype) -> None:
    world = make_world(dtype=dtype)
    world.add((), num_uncompressed)
    check(world)


@pytest.mark.parametrize("num_requests", [2, 5, 20])
def test_decode_on_one_shared_span(make_world: MakeWorld, num_requests: int) -> None:
    """Each size of a group has its own padding of q rows."""
    world = make_world()
    span = world.uneven_span(300)
    for i in range(num_requests):
        world.add((span,), 1 + 5 * i)
    check(world)


def test_a_shared_span_is_read_once_for_all(make_world: MakeWorld) -> None:
    world = make_world()
    span = world.uneven_span(200)
    for _ in range(8):
        world.add((span,), 10)
    world.attention.plan(world.batch())
    step = world.attention._decode_step
    assert isinstance(step, TileStep)
    for layer, work in enumerate(step.layout.layers):
        assert all(call.own_rows is None for call in work.calls)
        read = torch.cat([tiles.kv_rows[:, :, 0][tiles.mask[:, 0, 0].isfinite()] for tiles in work.shared])
        runs = zip(span.starts[layer].tolist(), span.lens[layer].tolist(), strict=True)
        mine = torch.cat([span.head_slots[start : start + length] for start, length in runs])
        assert sorted(read.tolist()) == sorted(mine.tolist())


def test_steps_and_changing_batches(make_world: MakeWorld) -> None:
    """Suffixes grow over block borders, requests come and go, their slots are used again; plans are kept."""
    world = make_world(num_layers=1)
    shared = world.uneven_span(90)
    world.add((shared,), 60)
    world.add((shared, world.uneven_span(40)), 1)
    check(world)
    for step in range(12):
        for i in range(len(world.paths)):
            world.grow(i, 1 + step % 3)
        if step == 4:
            world.add((shared,), 3)
        if step == 7:
            world.remove(0)
        check(world)
    assert len(world.attention._recent) <= 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_threads", [1, 64])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_decode_of_small_batches_that_share_nothing(
    make_world: MakeWorld,
    monkeypatch: pytest.MonkeyPatch,
    sizes: tuple[int, int, int],
    num_threads: int,
    dtype: torch.dtype,
) -> None:
    """Spans, none, several on one path, runs without entries; suffixes that grow out of their room."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)  # one: two heads to a row; many: one
    world = make_world(*sizes, dtype=dtype)
    some_empty = torch.tensor([[7] + [0] * (sizes[0] - 1), [0] * sizes[0]], dtype=torch.int32)
    world.add((world.uneven_span(100), world.uneven_span(20)), 62)
    world.add((), 1)
    world.add((world.span(some_empty, num_tokens=9),), 30)
    for _ in range(5):
        check(world)
        assert isinstance(world.attention._decode_step, RowStep)
        world.grow(0, 1)
        world.grow(2, 40)
    world.remove(0)
    check(world)


def test_rows_without_a_merge_are_kept_until_a_suffix_outgrows_its_room(make_world: MakeWorld) -> None:
    world = make_world()
    world.add((world.uneven_span(90),), 62)
    steps = []
    for _ in range(4):
        world.attention.plan(world.batch())
        steps.append(world.attention._decode_step)
        world.grow(0, 1)
    assert steps[0] is steps[1] is steps[2]
    assert steps[3] is not steps[2]


def test_what_does_not_fit_one_pass_is_cut_into_tiles(make_world: MakeWorld) -> None:
    world = make_world(num_layers=1)
    for _ in range(6):
        world.add((world.uneven_span(900),), 200)
    check(world)
    assert isinstance(world.attention._decode_step, TileStep)


def test_the_span_part_of_a_plan_is_kept(make_world: MakeWorld) -> None:
    world = make_world()
    shared = world.uneven_span(90)
    world.add((shared,), 10)
    world.add((shared,), 5)
    layouts = []
    for _ in range(3):
        world.attention.plan(world.batch())
        step = world.attention._decode_step
        assert isinstance(step, TileStep)
        layouts.append(step.layout)
        world.grow(0, 1)
        world.grow(1, 1)
    assert layouts[0] is layouts[1] is layouts[2]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_extend_of_every_kind(make_world: MakeWorld, sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    """New tokens alone, after a span, after cached tokens, after both; one new token; nothing but empty runs."""
    world = make_world(*sizes, dtype=dtype)
    shared = world.uneven_span(100)
    empty = world.span(torch.zeros(2, sizes[0], dtype=torch.int32), num_tokens=2)
    world.add((), 40)
    world.add((shared,), 63)
    world.add((), 100 + 20)
    world.add((world.uneven_span(30), shared), 33 + 2)
    world.add((shared,), 12)
    world.add((empty,), 17)
    world.add((), 1)
    check(world, [40, 63, 20, 2, 1, 17, 1])


@pytest.mark.parametrize("new", [2, 16, 17, 100])
def test_extend_one_request(make_world: MakeWorld, new: int) -> None:
    world = make_world()
    world.add((world.uneven_span(150),), 50 + new)
    check(world, [new])


def test_mixed_steps_reuse_the_decode_plan(make_world: MakeWorld) -> None:
    """Decode rows between prefill rows are planned once with the decode steps before and after."""
    world = make_world()
    shared = world.uneven_span(100)
    world.add((shared,), 20)
    world.add((), 30)
    world.add((shared,), 9)
    check(world, [1, 30, 1])
    mixed = world.attention._decode_step
    world.remove(1)
    check(world)
    alone = world.attention._decode_step
    assert isinstance(mixed, TileStep) and isinstance(alone, TileStep)
    assert alone.layout is mixed.layout


def test_small_calls_do_not_show(make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvevict_kernels.ragged_attention.cpu.CALL_BYTES", 1)
    world = make_world()
    shared = world.uneven_span(300)
    world.add((shared, world.uneven_span(200)), 200)
    world.add((shared,), 300)
    check(world)


def test_queries_in_another_dtype_than_the_arena(make_world: MakeWorld) -> None:
    """The arena decides what is stored, the model what it computes in."""
    world = make_world()
    span = world.uneven_span(100)
    world.add((span,), 20)
    world.add((span,), 70)
    for extend_lens in (None, [5, 60]):
        world.attention.plan(world.batch(extend_lens))
        q = world.queries(extend_lens).float()
        out, lse = world.attention.run(1, q, world.sm_scale)
        want_out, want_lse, _ = world.expected(1, q, extend_lens)
        assert out.dtype == torch.float32
        assert_accurate("out", out, want_out, want_out, noise=NOISE)
        assert_accurate("lse", lse, want_lse, want_lse, noise=NOISE)


def test_a_slice_of_a_fused_projection_is_a_valid_query(make_world: MakeWorld) -> None:
    world = make_world()
    world.add((world.uneven_span(100),), 20)
    for extend_lens in (None, [6]):
        world.attention.plan(world.batch(extend_lens))
        q = world.queries(extend_lens)
        fused = torch.cat([q.flatten(1), torch.randn(len(q), 100).to(q.dtype)], dim=1)
        strided = fused[:, :-100].view(q.shape)
        assert not strided.is_contiguous() or len(q) == 1
        for got, want in zip(
            world.attention.run(0, strided, world.sm_scale), world.attention.run(0, q, world.sm_scale), strict=True
        ):
            assert torch.equal(got, want)


def test_other_queries_than_planned_are_refused(make_world: MakeWorld) -> None:
    world = make_world()
    world.add((), 20)
    with pytest.raises(InvariantError, match=r"q: planned \[-1, 9, 64\]"):
        world.attention.run(0, world.queries(), world.sm_scale)
    world.attention.plan(world.batch())
    with pytest.raises(InvariantError, match=r"q: planned \[1, 9, 64\], got \[2, 9, 64\]"):
        world.attention.run(0, torch.zeros(2, 9, 64), world.sm_scale)


def test_arenas_of_other_sizes_are_refused(make_world: MakeWorld) -> None:
    world = make_world()
    with pytest.raises(ValueError, match=r"k_arena: expected shape \[2, 4000, 3, 64\], got \[1, 4000, 3, 64\]"):
        TorchAttention(world.geometry, world.k[:1], world.v)
    with pytest.raises(ValueError, match="v_arena: expected dtype bfloat16, got float32"):
        TorchAttention(world.geometry, world.k, world.v.float())


EMPTY_RUNS = torch.zeros(1, 1, dtype=torch.int32)
ALL_FOUR = SpanRuns(torch.zeros(0, dtype=torch.int32), EMPTY_RUNS, EMPTY_RUNS, num_tokens=4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"paths": ((ALL_FOUR,),)}, "request 0: waterline 4, 1 new of 4 tokens"),
        ({"extend_lens": [5]}, "request 0: waterline 0, 5 new of 4 tokens"),
        ({"seq_lens": [5000]}, "rows of 1500"),
        ({"paths": ()}, r"expected 1 of each, got \(0, 1, 1\)"),
        ({"extend_lens": [1, 1]}, r"expected 1 of each, got \(1, 2, 1\)"),
    ],
)
def test_contradicting_lengths_are_refused(change: dict[str, object], message: str) -> None:
    batch: dict[str, object] = {"paths": ((),), "seq_lens": [4], "extend_lens": None}
    batch |= {"req_pool_indices": torch.zeros(1), "req_to_token": torch.zeros(1, 1500, dtype=torch.int32), **change}
    with pytest.raises(InvariantError, match=message):
        AttentionBatch(**batch)  # type: ignore[arg-type]
