"""What is special about attention on a CPU that is compiled; what all must do: test_implementations.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers.implementations import BF16, FP32, LONG_LSE_NOISE, NUMBA, ODD, TWO_ROUNDINGS, add_all_prefills, threads
from helpers.tolerance import assert_same_bits
from kvevict_kernels.span_attention import Layout, words
from kvevict_kernels.span_attention.layout import count_chunks
from sgl_kvevict.attention.cpu.numba_attention import MAX_SHORT_TOKENS


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("sizes", ODD, ids=str)
def test_long_prefills_of_every_kind(start, monkeypatch, sizes, dtype):
    """All are long but those of one token."""
    monkeypatch.setattr("sgl_kvevict.attention.cpu.numba_attention.MAX_SHORT_TOKENS", 1)
    runner, world = start(NUMBA, *sizes, dtype=dtype)
    runner.check(add_all_prefills(world), TWO_ROUNDINGS[dtype], LONG_LSE_NOISE[dtype])


def test_a_layout_is_kept_while_nothing_changes(start):
    runner, world = start(NUMBA, num_layers=1)
    shared = world.uneven_span(90)
    world.add((shared,), 60)
    runner.plan()
    layout = runner.attention._layout
    for step in range(6):
        world.grow(0, 1 + step % 3)
        runner.plan()
        assert runner.attention._layout is layout
    for _ in range(3):
        world.add((shared,), 3)
        runner.check()
    assert len(runner.attention._recent._kept) <= 2


def test_other_head_dims_than_multiples_of_16_are_refused(start):
    with pytest.raises(RuntimeError, match="the head dimension is 24, which is no multiple of 16"):
        start(NUMBA, 1, 1, 24)


def test_a_shared_span_is_one_part_for_all(start):
    runner, world = start(NUMBA)
    span = world.uneven_span(200)
    for _ in range(8):
        world.add((span,), 10)
    runner.attention.plan(world.batch())
    layout = runner.attention._layout
    assert isinstance(layout, Layout)
    assert layout.spans == [span]
    assert layout.num_tokens.tolist() == [8] + 8 * [1]


def test_long_units_have_longer_chunks(start):
    """The host counts partial results as the call cuts them."""
    lens = torch.arange(0, 20_000, 37).numpy()
    counts = count_chunks(lens)
    assert counts.max() == words.MAX_CHUNKS
    assert (counts[lens <= words.CHUNK] <= 1).all()
    runner, world = start(NUMBA, 1, 2, 16, num_layers=1, num_token_slots=9000)
    span = world.span(torch.tensor([[words.CHUNK * words.MAX_CHUNKS + 5]], dtype=torch.int32), num_tokens=5000)
    world.add((replace(span, num_tokens=100, positions=torch.zeros_like(span.rows)),), 3)  # rows of tests are shorter
    runner.check()


def test_what_a_request_gets_depends_neither_on_others_nor_on_threads(start):
    runner, world = start(NUMBA)
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
            runner.attention.plan(type(batch)(**part, req_to_token=batch.req_to_token))
            return runner.attention.run(1, q[tokens], world.sm_scale)

    together = results(0, 3, 2)
    for num_threads in (1, 3):
        for name, got, want in zip(("out", "lse"), results(0, 3, num_threads), together, strict=True):
            assert_same_bits(name, got, want)
    for i in range(3):
        rows = slice(sum(extend_lens[:i]), sum(extend_lens[: i + 1]))
        for name, got, want in zip(("out", "lse"), results(i, i + 1, 2), together, strict=True):
            assert_same_bits(name, got, want[rows])


def test_partial_results_of_a_request_behind_many_spans_are_bounded(start, monkeypatch):
    """A chat of many turns has a span for each, and the memory of partial results is never given back."""
    runner, world = start(NUMBA, num_layers=1, dtype=FP32)
    limit = 60 * 4 * world.geometry.num_qo_heads * world.geometry.v_head_dim  # 60 partial results of a token
    monkeypatch.setattr("sgl_kvevict.attention.cpu.numba_attention.MAX_PARTIAL_BYTES", limit)
    turns = tuple(world.uneven_span(40) for _ in range(8))
    new_lens = [20, 20, 1, 20]
    for path, num_new in zip((turns, turns[:1], turns, ()), new_lens, strict=True):
        world.add(path, num_new)
    runner.check(new_lens, TWO_ROUNDINGS[FP32], LONG_LSE_NOISE[FP32])
    layout = runner.attention._layout
    assert isinstance(layout, Layout) and layout.new_lens.tolist() == [20, 1, 20]
    assert layout.max_span_partials <= world.geometry.num_kv_heads * (20 + 8)


def test_long_prefills_beside_short_ones(start):
    """The long ones go through PyTorch, whose halves are rounded before they are merged."""
    runner, world = start(NUMBA, num_layers=1, dtype=FP32)
    shared = world.uneven_span(100)
    world.add((shared,), 20)
    world.add((), MAX_SHORT_TOKENS + 1)
    world.add((shared,), 30)
    world.add((), MAX_SHORT_TOKENS)
    runner.check([1, MAX_SHORT_TOKENS + 1, 30, MAX_SHORT_TOKENS])
    for i in (3, 2, 0):
        world.remove(i)
    runner.check([MAX_SHORT_TOKENS + 1])


def test_large_and_hidden_scores(start):
    """Scores far apart: weights vanish, sums stay finite, whichever key comes first."""
    runner, world = start(NUMBA, 1, 1, 16, num_layers=1, dtype=FP32)
    world.add((world.uneven_span(200),), 300)
    slots = world.req_to_token[world.rows[0], world.compressed_lens[0] : world.seq_lens[0]].long()
    world.k[0, slots] *= torch.linspace(-60, 60, 300)[:, None, None]
    runner.check()


def test_nan_stays_nan_where_it_is_read(start):
    runner, world = start(NUMBA, num_layers=1)
    world.add((), 30)
    world.add((), 30)
    world.v[0, world.req_to_token[world.rows[0], 3].long(), 1] = torch.nan
    runner.attention.plan(world.batch())
    out, _ = runner.attention.run(0, world.queries(), world.sm_scale)
    assert out.isnan().any(-1).nonzero().tolist() == [[0, 3], [0, 4], [0, 5]]


def test_slots_outside_of_the_arena_are_refused(start):
    runner, world = start(NUMBA)
    world.add((world.uneven_span(50),), 20)
    place = world.rows[0], world.compressed_lens[0] + 5
    before = int(world.req_to_token[place])
    for wrong in (world.geometry.num_token_slots, -1):
        world.req_to_token[place] = wrong
        runner.attention.plan(world.batch())
        with pytest.raises(IndexError, match=r"head slot -?\d+: the arena has 24000"):
            runner.attention.run(1 if wrong > 0 else 0, world.queries(), world.sm_scale)
    world.req_to_token[place] = before
    runner.check()


def test_spans_whose_runs_leave_their_lists_are_refused(start):
    runner, world = start(NUMBA)
    span = world.uneven_span(50)
    span.lens[1, 2] += 10**6
    world.add((span,), 5)
    with pytest.raises(ValueError, match="a run leaves the span's"):
        runner.attention.plan(world.batch())


def test_rows_outside_of_the_pool_are_refused(start):
    runner, world = start(NUMBA)
    world.add((), 5)
    world.rows[0] = 32
    with pytest.raises(ValueError, match=r"rows: expected 0 to 31, got \[32\]"):
        runner.attention.plan(world.batch())


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("sizes", [(1, 4, 48, 32), (1, 3, 576, 512)], ids=str)
def test_values_that_begin_the_rows_of_the_keys(start, sizes, dtype):
    """Latent attention: decode, short extends, and a prefill by PyTorch's flash attention."""
    runner, world = start(NUMBA, *sizes[:3], dtype=dtype, latent_dim=sizes[3])
    shared = world.uneven_span(100)
    world.add((), 40)
    world.add((shared, world.uneven_span(63)), 30)
    world.add((shared,), MAX_SHORT_TOKENS + 9)
    runner.check()
    runner.check([40, 7, 9])
    runner.check([1, 7, MAX_SHORT_TOKENS + 1], TWO_ROUNDINGS[dtype], LONG_LSE_NOISE[dtype])
