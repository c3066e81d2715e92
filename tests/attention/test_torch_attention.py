from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from helpers.poison import poisoned_allocations
from helpers.tolerance import FLOAT32_NOISE, assert_accurate
from kvevict_kernels.span_runs import SpanRuns
from sgl_kvevict.attention import AttentionBatch, TorchAttention
from sgl_kvevict.attention.cpu.torch_attention import QUERY_BLOCK
from sgl_kvevict.errors import InvariantError
from sgl_kvevict.geometry import KVGeometry

if TYPE_CHECKING:
    from conftest import MakeWorld, World

DTYPES = [torch.bfloat16, torch.float32]
NOISE = 4 * FLOAT32_NOISE
"""Two float32 softmaxes over up to 1,400 keys."""


def check(world: World, extend_lens: list[int] | None = None) -> None:
    """Plan, and compare every layer with PyTorch's attention on dense keys; fresh allocations are NaN."""
    world.attention.plan(world.batch(extend_lens))
    for layer in range(world.geometry.num_layers):
        q = world.queries(extend_lens)
        with poisoned_allocations():
            out, lse = world.attention.run(layer, q, world.sm_scale)
        want_out, want_lse = world.dense(layer, q.float(), extend_lens)
        baseline, _ = world.dense(layer, q, extend_lens)
        assert out.dtype == q.dtype
        assert lse.dtype == torch.float32
        assert_accurate("out", out, want_out, baseline, noise=NOISE)
        assert_accurate("lse", lse, want_lse, want_lse, noise=NOISE)


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
    world = make_world()
    span = world.uneven_span(300)
    for i in range(num_requests):
        world.add((span,), 1 + 5 * i)
    check(world)


def test_steps_and_changing_batches(make_world: MakeWorld) -> None:
    """Suffixes grow, requests come and go, their slots are used again."""
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


def test_worked_example() -> None:
    """Weights 1 (span), 4 (own) and 2 (new token) of 7; a sink of log 8 makes them as much of 15."""
    log2 = float(torch.tensor(2.0).log())
    geometry = KVGeometry(num_layers=1, num_qo_heads=1, num_kv_heads=1, head_dim=2, num_token_slots=6)
    k, v = torch.full((2, 1, 6, 1, 2), torch.nan)
    k[0, [1, 3, 5], 0] = torch.tensor([[0.0, 9.0], [2.0, 9.0], [1.0, 9.0]])
    v[0, [1, 3, 5], 0] = torch.tensor([[7.0, 0.0], [0.0, 7.0], [7.0, 7.0]])
    one = torch.ones(1, 1, dtype=torch.int32)
    span = SpanRuns(torch.tensor([0, 1], dtype=torch.int32), one, one, num_tokens=4)
    attention = TorchAttention(geometry, k, v)
    row = torch.zeros(1, 8, dtype=torch.int32)
    row[0, 4:6] = torch.tensor([3, 5])
    q = torch.tensor([[[2 * log2, 0.0]]])
    attention.plan(AttentionBatch(((span,),), [6], None, torch.zeros(1, dtype=torch.int64), row))
    for sink, want, total in (
        (None, [3.0, 6.0], 7.0),
        (torch.tensor([3 * log2]), [21 / 15, 42 / 15], 15.0),
    ):
        out, lse = attention.run(0, q, 0.5, sink)
        torch.testing.assert_close(out, torch.tensor([[want]]))
        torch.testing.assert_close(lse, torch.tensor([[total]]).log())


@pytest.mark.parametrize("new", [QUERY_BLOCK, QUERY_BLOCK + 1])
def test_blocks_of_queries_do_not_show(make_world: MakeWorld, new: int) -> None:
    world = make_world(1, 2, 16, num_layers=1, dtype=torch.float32)
    world.add((world.uneven_span(50),), 30 + new)
    check(world, [new])


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
        ({"paths": ((ALL_FOUR,),)}, "request 0: compressed_len 4, 1 new of 4 tokens"),
        ({"extend_lens": [5]}, "request 0: compressed_len 0, 5 new of 4 tokens"),
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
