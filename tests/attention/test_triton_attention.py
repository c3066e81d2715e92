"""What is special about the kernels for a GPU; what all must do: test_implementations.py."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import Mock, create_autospec

import pytest
import torch

from helpers.implementations import BF16, FP32, IN_REAL_CHUNKS, NOISE, ON_GPU, add_all_kinds, finest, no_entries, take
from helpers.tolerance import assert_accurate, assert_same_bits
from kvevict_kernels.device_limits import INTERPRETER, limits_of
from kvevict_kernels.ragged_decode.host_lists import SPLIT_ROWS
from kvevict_kernels.ragged_decode.launch import plan_batch
from kvevict_kernels.ragged_decode.tile_table import SMALL_SHARED
from kvevict_kernels.ragged_decode.triton_merge import MERGE_RUNS
from sgl_kvevict.attention.flashinfer.prefill import PlainPrefill
from sgl_kvevict.attention.flashinfer.wrapper import PagedPrefill
from sgl_kvevict.attention.triton.attention import TritonAttention


@pytest.mark.parametrize("kind", IN_REAL_CHUNKS)
def test_decode_with_the_real_chunks(start, kind):
    runner, world = start(kind, 1, 4, 16, num_token_slots=2200)
    span = world.span(torch.tensor([[30], [700]], dtype=torch.int32), num_tokens=800)
    world.add((span,), 600)
    runner.check()


@pytest.mark.parametrize("kind", IN_REAL_CHUNKS)
def test_sharers_with_the_real_tile(start, kind):
    """80 q rows of a span: one tile of 128 on sm_90, two of 64 elsewhere."""
    runner, world = start(kind, 1, 4, 16, num_token_slots=1000)
    span = world.span(torch.tensor([[3], [700]], dtype=torch.int32), num_tokens=800)
    for i in range(20):
        world.add((span,), 1 + i % 3)
    runner.check()
    tables = runner.attention._planned.addresses.tables
    tiles = -(-80 // tables.sizes.decode_rows[1])
    assert int(tables.classes[1].item_count[1]) == tiles * -(-700 // int(tables.span_chunk))


@pytest.fixture
def on_sm_89(interpreted, monkeypatch):
    """The interpreter runs the tiles of sm_89."""
    limits = replace(INTERPRETER, arch=89, shared_per_sm=SMALL_SHARED)
    monkeypatch.setattr("kvevict_kernels.device_limits.INTERPRETER", limits)
    limits_of.cache_clear()
    yield
    limits_of.cache_clear()


@pytest.mark.parametrize("bits", [16, 4])
@pytest.mark.usefixtures("on_sm_89")
def test_sharers_with_the_tile_of_sm_89(make_world, bits):
    """168 q rows read a span, 80 a suffix, in tiles of 128, with and without a window."""
    world = make_world(1, 4, 96, dtype=torch.float16, windows=(0, 60), num_token_slots=600).learn()
    span = world.span(torch.tensor([[90], [150]], dtype=torch.int32), num_tokens=200, bits=bits)
    news = [*[1] * 12, 10, 20]
    for new in news:
        world.add((span,), new + 2)
    world.add((), 20 + 40)
    attention = TritonAttention(world.geometry, world.k, world.v, coding=world.coding)
    world.check(attention, [*news, 20])
    tables = attention._planned.addresses.tables
    assert tables.sizes.decode_rows == (16, 128)
    assert tables.sizes.num_resident(1) == tables.sizes.num_sms


@pytest.mark.parametrize("kind", ON_GPU)
@pytest.mark.parametrize("sharers", [4, 9])
def test_sharers_read_a_span_once(start, kind, sharers):
    """Work items of a shared span do not grow with its sharers while their q rows fit one tile."""
    runner, world = start(kind, 2, 4, 16, num_token_slots=300)
    span = world.uneven_span(60)
    for i in range(sharers):
        world.add((span,), 1 + i)
    runner.check()
    tables = runner.attention._planned.addresses.tables
    which = int(sharers * 4 > 16)
    chunk = int(tables.span_chunk)
    items = tables.classes[which].item_count.tolist()
    assert items == ((span.lens + chunk - 1) // chunk).sum(1).tolist()
    assert tables.classes[1 - which].item_count.tolist() == [0, 0]


@pytest.mark.parametrize("kind", ON_GPU)
def test_a_path_of_more_runs_than_are_found_at_once(start, kind):
    """Blocks of partials end in the middle of runs; some runs are empty; a shorter path of the same spans beside."""
    runner, world = start(kind, 2, 4, 16, num_token_slots=900)
    path = tuple(world.uneven_span(40 if i % 3 else 4) for i in range(MERGE_RUNS + 1))
    world.add((*path[:9], no_entries(world), *path[9:]), 50)
    world.add(path[: MERGE_RUNS - 1], 3)
    world.add(path[:MERGE_RUNS], 1)
    runner.check()


@pytest.mark.parametrize("kind", ON_GPU)
def test_extends_short_and_long_and_decode_rows(start, kind):
    """Short ones are split over their keys, long ones are not; a span is read by rows of all three kinds."""
    runner, world = start(kind, 2, 4, 16, num_token_slots=600)
    shared = world.uneven_span(40)
    num_long = SPLIT_ROWS // 4 + 5
    world.add((shared,), 9)
    world.add((world.uneven_span(20), shared), 11 + 7)
    world.add((shared,), 20 + num_long)
    world.add((), 33)
    world.add((), 3)
    runner.check([1, 7, num_long, 33, 2])


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("kind", ON_GPU)
@pytest.mark.usefixtures("many_sms")
def test_keys_of_a_few_tiles_are_split(start, kind, dtype):
    """Parts that begin and end in the middle of runs, or hold nothing of a head; requests of other lengths beside."""
    runner, world = start(kind, 2, 3, 16, num_token_slots=900, dtype=dtype)
    empty = no_entries(world)
    shared = world.uneven_span(70)
    world.add((shared, empty, world.uneven_span(33)), 61)
    world.add((), 150)
    world.add((shared,), 5)
    new_lens = [45, 150, 1]
    runner.check(new_lens)
    splits = runner.attention._planned.addresses.tables.num_splits.tolist()
    assert splits[0] > 3 and splits[1] > 1 and splits[2] == 0
    q = world.queries(new_lens)
    out, lse = runner.attend(1, q, new_lens)
    take(world, [0])
    alone = runner.attend(1, q[:45], [45])
    assert_same_bits("out", alone[0], out[:45])
    assert_same_bits("lse", alone[1], lse[:45])


@pytest.mark.parametrize("kind", ON_GPU)
@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        ((4, 48, 32), FP32),
        ((16, 576, 512), FP32),
        ((128, 576, 512), BF16),
    ],
    ids=str,
)
def test_latents(start, kind, sizes, dtype):
    """Values begin the keys' rows, of one head that 4 to 128 query heads read: decode, then new tokens of all kinds.

    Sharers of a span; an empty one; a single entry; prefills whose new tokens end in the middle of a block of keys.
    """
    group, head_dim, latent_dim = sizes
    runner, world = start(kind, 1, group, head_dim, dtype=dtype, num_token_slots=300, latent_dim=latent_dim)
    empty = no_entries(world)
    single = world.span(torch.ones(2, 1, dtype=torch.int32), num_tokens=9)
    shared = world.span(torch.tensor([[3], [41]], dtype=torch.int32), num_tokens=50)
    num_long = SPLIT_ROWS // group + 1
    world.add((), num_long + 3)
    world.add((empty, shared), 5)
    for i in range(3):
        world.add((shared, single), 1 + i)
    runner.check()
    runner.check([num_long, 5, 1, 2, 1])


@pytest.mark.parametrize("kind", ON_GPU)
@pytest.mark.usefixtures("many_sms")
def test_keys_of_latents_are_split(start, kind):
    runner, world = start(kind, 1, 128, 48, num_token_slots=400, dtype=finest(kind), latent_dim=32)
    shared = world.uneven_span(60)
    world.add((shared, world.uneven_span(33)), 40)
    runner.check([3])
    assert runner.attention._planned.addresses.tables.has_splits


@pytest.mark.parametrize("kind", IN_REAL_CHUNKS)
def test_extend_longer_than_a_tile(start, kind):
    runner, world = start(kind, 1, 3, 16, num_token_slots=400, dtype=finest(kind))
    world.add((world.uneven_span(70),), 30 + 100)
    runner.check([100])


@pytest.mark.parametrize("kind", ON_GPU)
def test_a_row_does_not_depend_on_its_batch(start, kind, monkeypatch):
    """The same bits alone, in another batch, beside another reader of its span, and on another grid."""
    runner, world = start(kind, 2, 4, 16, num_token_slots=500)
    add_all_kinds(world, 0.45)
    q = world.queries()
    out, lse = runner.attend(1, q)
    monkeypatch.setattr("kvevict_kernels.ragged_decode.triton_impl._num_programs", lambda *args: 7)
    kept = [1, 2, 5]
    take(world, kept)
    again = runner.attend(1, q[kept])
    assert_same_bits("out", again[0], out[kept])
    assert_same_bits("lse", again[1], lse[kept])


@pytest.mark.parametrize("kind", ON_GPU)
def test_a_step_keeps_the_tables(start, kind, monkeypatch):
    """Suffixes grow over chunk borders, then a request leaves; lengths may come from the device."""
    runner, world = start(kind, 1, 3, 16, num_token_slots=300)
    shared = world.uneven_span(30)
    world.add((shared,), 15)
    world.add((shared,), 2)
    plan = Mock(wraps=plan_batch)
    monkeypatch.setattr("sgl_kvevict.attention.triton.attention.plan_batch", plan)
    for _ in range(3):
        runner.check()
        world.grow(0, 1)
        world.grow(1, 9)
    assert plan.call_count == 1
    q = world.queries()
    want = runner.attend(0, q)
    wrong_on_host = replace(runner.batch(), device_seq_lens=torch.tensor(world.seq_lens, device=kind.device))
    runner.attention.plan(wrong_on_host)
    got = runner.attention.run(0, q.to(kind.device), world.sm_scale)
    assert_same_bits("out", got[0].cpu(), want[0])
    world.remove(0)
    runner.check()
    assert plan.call_count == 2


@pytest.mark.parametrize("kind", IN_REAL_CHUNKS)
@pytest.mark.usefixtures("flashinfer_plans")
def test_long_prefills_without_spans_go_elsewhere(start, kind, monkeypatch):
    """FlashInfer gets the requests that read no span, ours the others; in a block, and apart from each other."""
    runner, world = start(kind, 2, 4, 64, num_token_slots=900)
    world.add((), 44)
    world.add((world.uneven_span(40),), 50)
    world.add((), 60)
    world.add((), 41)
    ours = runner.attend(1, q := world.queries([2, 40, 45, 41]), [2, 40, 45, 41])
    plan = create_autospec(PagedPrefill.plan, side_effect=PagedPrefill.plan)
    monkeypatch.setattr(PagedPrefill, "plan", plan)
    arenas = (runner.attention.k_arena, runner.attention.v_arena)
    plain = PlainPrefill(world.geometry, *arenas)
    runner.attention = TritonAttention(world.geometry, *arenas, plain_prefill=plain)
    both = runner.attend(1, q, [2, 40, 45, 41])
    assert plan.call_count == 1
    assert_same_bits("rows that read a span", both[0][:42], ours[0][:42])
    assert_accurate("out", both[0][42:], ours[0][42:].float(), ours[0][42:], noise=2.0**-7)
    assert_accurate("lse", both[1][42:], ours[1][42:], ours[1][42:], noise=NOISE)
    runner.check([3, 40, 1, 41])
    runner.check([3, 33, 45, 2])
    runner.check([40, 36, 45, 2])
    runner.check()
