from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import torch

from helpers.poison import poisoned_allocations
from helpers.tolerance import FLOAT32_NOISE, assert_accurate, assert_same_bits
from kvevict_kernels.span_attention import Layout, words
from kvevict_kernels.span_attention.layout import count_chunks
from sgl_kvevict.attention.cpu.numba_attention import MAX_SHORT_TOKENS, NumbaAttention
from sgl_kvevict.errors import InvariantError

if TYPE_CHECKING:
    from conftest import MakeWorld, World

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
NOISE = 4 * FLOAT32_NOISE
"""Two float32 softmaxes over up to 1,400 keys."""
TWO_ROUNDINGS = {torch.bfloat16: 2.0**-8, torch.float32: NOISE}
"""Long prefills: both halves are rounded before they are merged, half a unit in the last place each."""
LONG_LSE_NOISE = {torch.bfloat16: 1e-4, torch.float32: NOISE}
"""PyTorch's flash attention takes a quick exponential for 16-bit inputs: 6e-5 seen at an lse near 1."""
SIZES = [(3, 3, 64), (1, 1, 16), (2, 5, 80), (5, 7, 32), (4, 1, 128)]

MakeNumbaWorld = Callable[..., "World"]


@contextmanager
def threads(number: int) -> Iterator[None]:
    """So many threads for what is planned meanwhile; by default a worker of the test run has its share of the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.fixture
def make_numba_world(make_world: MakeWorld) -> MakeNumbaWorld:
    """A world whose attention is compiled."""

    def make(*args: int, **kwargs: object) -> World:
        world = make_world(*args, **kwargs)
        world.attention = NumbaAttention(world.geometry, world.k, world.v)
        return world

    return make


def check(world: World, extend_lens: list[int] | None = None, noise: float = NOISE, lse_noise: float = NOISE) -> None:
    """Plan on two threads, and compare every layer with the plain implementation; fresh allocations are NaN."""
    with threads(2):
        world.attention.plan(world.batch(extend_lens))
    for layer in range(world.geometry.num_layers):
        q = world.queries(extend_lens)
        with poisoned_allocations():
            out, lse = world.attention.run(layer, q, world.sm_scale)
        want_out, want_lse, baseline = world.expected(layer, q, extend_lens)
        assert out.dtype == q.dtype
        assert lse.dtype == torch.float32
        assert_accurate("out", out, want_out, baseline, noise=noise)
        assert_accurate("lse", lse, want_lse, want_lse, noise=lse_noise)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_decode_of_every_kind_of_request(
    make_numba_world: MakeNumbaWorld, sizes: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """Nothing compressed; one span; a span shared by three; at other depths; only empty runs; a suffix of one."""
    world = make_numba_world(*sizes, dtype=dtype)
    empty = world.span(torch.zeros(2, sizes[0], dtype=torch.int32), num_tokens=1)
    shared, deep = world.uneven_span(100), world.uneven_span(63)
    world.add((), 100)
    world.add((world.uneven_span(150),), 63)
    world.add((shared, deep), 1)
    world.add((empty, world.uneven_span(5), shared), 30)
    world.add((deep, shared), 7)
    world.add((empty,), 1)
    world.add((), 1)
    check(world)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_extend_of_every_kind(
    make_numba_world: MakeNumbaWorld, sizes: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """New tokens alone, after a span, after cached tokens, after both; one new token; nothing but empty runs."""
    world = make_numba_world(*sizes, dtype=dtype)
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_long_prefills_of_every_kind(
    make_numba_world: MakeNumbaWorld,
    monkeypatch: pytest.MonkeyPatch,
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
) -> None:
    """New tokens alone, after a span, after cached tokens, after both, after nothing but empty runs; decode beside."""
    monkeypatch.setattr("sgl_kvevict.attention.cpu.numba_attention.MAX_SHORT_TOKENS", 1)
    world = make_numba_world(*sizes, dtype=dtype)
    shared = world.uneven_span(100)
    empty = world.span(torch.zeros(2, sizes[0], dtype=torch.int32), num_tokens=2)
    world.add((), 40)
    world.add((shared,), 63)
    world.add((), 100 + 20)
    world.add((world.uneven_span(30), shared), 33 + 2)
    world.add((shared,), 12)
    world.add((empty,), 17)
    check(world, [40, 63, 20, 2, 1, 17], TWO_ROUNDINGS[dtype], LONG_LSE_NOISE[dtype])


@pytest.mark.parametrize("num_uncompressed", [1, 15, 16, 17, 63, 64, 65, 255, 256, 257, 1400])
def test_decode_without_spans(make_numba_world: MakeNumbaWorld, num_uncompressed: int) -> None:
    world = make_numba_world()
    world.add((), num_uncompressed)
    check(world)


@pytest.mark.parametrize("num_requests", [2, 5, 20])
def test_decode_on_one_shared_span(make_numba_world: MakeNumbaWorld, num_requests: int) -> None:
    world = make_numba_world()
    span = world.uneven_span(600)
    for i in range(num_requests):
        world.add((span,), 1 + 5 * i)
    check(world)


def test_a_shared_span_is_one_part_for_all(make_numba_world: MakeNumbaWorld) -> None:
    world = make_numba_world()
    span = world.uneven_span(200)
    for _ in range(8):
        world.add((span,), 10)
    world.attention.plan(world.batch())
    assert isinstance(world.attention, NumbaAttention)
    layout = world.attention._layout
    assert isinstance(layout, Layout)
    assert layout.spans == [span]
    assert layout.num_tokens.tolist() == [8] + 8 * [1]


def test_long_units_have_longer_chunks(make_numba_world: MakeNumbaWorld) -> None:
    """The host counts partial results as the call cuts them."""
    lens = torch.arange(0, 20_000, 37).numpy()
    counts = count_chunks(lens)
    assert counts.max() == words.MAX_CHUNKS
    assert (counts[lens <= words.CHUNK] <= 1).all()
    world = make_numba_world(1, 2, 16, num_layers=1, num_token_slots=9000)
    run_lens = torch.tensor([[words.CHUNK * words.MAX_CHUNKS + 5]], dtype=torch.int32)
    world.add((world.span(run_lens, num_tokens=100),), 3)
    check(world)


def test_steps_and_changing_batches(make_numba_world: MakeNumbaWorld) -> None:
    """Suffixes grow, requests come and go, their slots are used again; layouts are kept while nothing changes."""
    world = make_numba_world(num_layers=1)
    assert isinstance(world.attention, NumbaAttention)
    shared = world.uneven_span(90)
    world.add((shared,), 60)
    world.add((shared, world.uneven_span(40)), 1)
    check(world)
    layout = world.attention._layout
    for step in range(12):
        for i in range(len(world.paths)):
            world.grow(i, 1 + step % 3)
        if step == 4:
            assert world.attention._layout is layout
            world.add((shared,), 3)
        if step == 7:
            world.remove(0)
        check(world)
    assert len(world.attention._recent) <= 2


def test_what_a_request_gets_depends_neither_on_others_nor_on_threads(make_numba_world: MakeNumbaWorld) -> None:
    world = make_numba_world()
    shared, own = world.uneven_span(700), world.uneven_span(300)
    world.add((shared, own), 40)
    world.add((), 500)
    world.add((shared,), 9)
    extend_lens = [1, 30, 5]
    q = world.queries(extend_lens)

    def results(first: int, last: int, num_threads: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = slice(sum(extend_lens[:first]), sum(extend_lens[:last]))
        batch = world.batch(extend_lens)
        part = {
            name: getattr(batch, name)[first:last] for name in ("paths", "seq_lens", "extend_lens", "req_pool_indices")
        }
        with threads(num_threads):
            world.attention.plan(type(batch)(**part, req_to_token=batch.req_to_token))
            return world.attention.run(1, q[tokens], world.sm_scale)

    together = results(0, 3, 2)
    for num_threads in (1, 3):
        for name, got, want in zip(("out", "lse"), results(0, 3, num_threads), together, strict=True):
            assert_same_bits(name, got, want)
    for i in range(3):
        rows = slice(sum(extend_lens[:i]), sum(extend_lens[: i + 1]))
        for name, got, want in zip(("out", "lse"), results(i, i + 1, 2), together, strict=True):
            assert_same_bits(name, got, want[rows])


def test_long_prefills_beside_short_ones(make_numba_world: MakeNumbaWorld) -> None:
    """The long ones go through PyTorch, whose halves are rounded before they are merged."""
    world = make_numba_world(num_layers=1, dtype=torch.float32)
    shared = world.uneven_span(100)
    world.add((shared,), 20)
    world.add((), MAX_SHORT_TOKENS + 1)
    world.add((shared,), 30)
    world.add((), MAX_SHORT_TOKENS)
    check(world, [1, MAX_SHORT_TOKENS + 1, 30, MAX_SHORT_TOKENS])
    for i in (3, 2, 0):
        world.remove(i)
    check(world, [MAX_SHORT_TOKENS + 1])


def test_queries_in_another_dtype_than_the_arena(make_numba_world: MakeNumbaWorld) -> None:
    world = make_numba_world()
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


def test_a_slice_of_a_fused_projection_is_a_valid_query(make_numba_world: MakeNumbaWorld) -> None:
    world = make_numba_world()
    world.add((world.uneven_span(100),), 20)
    for extend_lens in (None, [6]):
        world.attention.plan(world.batch(extend_lens))
        q = world.queries(extend_lens)
        strided = torch.cat([q.flatten(1), torch.randn(len(q), 100).to(q.dtype)], dim=1)[:, :-100].view(q.shape)
        swapped = q.transpose(1, 2).contiguous().transpose(1, 2)
        want = world.attention.run(0, q, world.sm_scale)
        for other in (strided, swapped):
            for name, got, expected in zip(
                ("out", "lse"), world.attention.run(0, other, world.sm_scale), want, strict=True
            ):
                assert_same_bits(name, got, expected)


def test_large_and_hidden_scores(make_numba_world: MakeNumbaWorld) -> None:
    """Scores far apart: weights vanish, sums stay finite, whichever key comes first."""
    world = make_numba_world(1, 1, 16, num_layers=1, dtype=torch.float32)
    world.add((world.uneven_span(200),), 300)
    slots = world.req_to_token[world.rows[0], world.compressed_lens[0] : world.seq_lens[0]].long()
    world.k[0, slots] *= torch.linspace(-60, 60, 300)[:, None, None]
    check(world)


def test_nan_stays_nan_where_it_is_read(make_numba_world: MakeNumbaWorld) -> None:
    world = make_numba_world(num_layers=1)
    world.add((), 30)
    world.add((), 30)
    world.v[0, world.req_to_token[world.rows[0], 3].long(), 1] = torch.nan
    world.attention.plan(world.batch())
    out, _ = world.attention.run(0, world.queries(), world.sm_scale)
    assert out.isnan().any(-1).nonzero().tolist() == [[0, 3], [0, 4], [0, 5]]


def test_other_queries_than_planned_are_refused(make_numba_world: MakeNumbaWorld) -> None:
    world = make_numba_world()
    world.add((), 20)
    with pytest.raises(InvariantError, match=r"q: planned \[-1, 9, 64\]"):
        world.attention.run(0, world.queries(), world.sm_scale)
    world.attention.plan(world.batch())
    with pytest.raises(InvariantError, match=r"q: planned \[1, 9, 64\], got \[2, 9, 64\]"):
        world.attention.run(0, torch.zeros(2, 9, 64), world.sm_scale)


def test_slots_outside_of_the_arena_are_refused(make_numba_world: MakeNumbaWorld) -> None:
    world = make_numba_world()
    world.add((world.uneven_span(50),), 20)
    place = world.rows[0], world.compressed_lens[0] + 5
    before = int(world.req_to_token[place])
    for wrong in (world.geometry.num_token_slots, -1):
        world.req_to_token[place] = wrong
        world.attention.plan(world.batch())
        with pytest.raises(IndexError, match=r"head slot -?\d+: the arena has 24000"):
            world.attention.run(1 if wrong > 0 else 0, world.queries(), world.sm_scale)
    world.req_to_token[place] = before
    check(world)


def test_spans_whose_runs_leave_their_lists_are_refused(make_numba_world: MakeNumbaWorld) -> None:
    world = make_numba_world()
    span = world.uneven_span(50)
    span.lens[1, 2] += int(span.rows.numel())
    world.add((span,), 5)
    with pytest.raises(ValueError, match="a run leaves the span's"):
        world.attention.plan(world.batch())


def test_rows_outside_of_the_pool_are_refused(make_numba_world: MakeNumbaWorld) -> None:
    world = make_numba_world()
    world.add((), 5)
    world.rows[0] = 32
    with pytest.raises(ValueError, match=r"rows: expected 0 to 31, got \[32\]"):
        world.attention.plan(world.batch())


def test_arenas_of_other_sizes_are_refused(make_numba_world: MakeNumbaWorld) -> None:
    world = make_numba_world()
    with pytest.raises(ValueError, match="v_arena: expected dtype bfloat16, got float32"):
        NumbaAttention(world.geometry, world.k, world.v.float())
    with pytest.raises(RuntimeError, match="the head dimension is 24, which is no multiple of 16"):
        make_numba_world(1, 1, 24)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("sizes", [(1, 4, 48, 32), (1, 3, 576, 512)], ids=str)
def test_values_that_begin_the_rows_of_the_keys(
    make_numba_world: MakeNumbaWorld, sizes: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    """Latent attention: decode, short extends, and a prefill by PyTorch's flash attention."""
    world = make_numba_world(*sizes[:3], dtype=dtype, latent_dim=sizes[3])
    shared = world.uneven_span(100)
    world.add((), 40)
    world.add((shared, world.uneven_span(63)), 30)
    world.add((shared,), MAX_SHORT_TOKENS + 9)
    check(world)
    check(world, [40, 7, 9])
    check(world, [1, 7, MAX_SHORT_TOKENS + 1], TWO_ROUNDINGS[dtype], LONG_LSE_NOISE[dtype])
