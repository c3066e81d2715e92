"""Decode steps that a graph recorded follow requests to other spans; on a CPU a tape stands in for the graph."""

from __future__ import annotations

import pytest
import torch

from helpers.captured_decode import Captured
from sgl_kvevict.attention.triton.attention import TritonAttention
from sgl_kvevict.errors import InvariantError, UnsupportedSetupError

pytestmark = [
    pytest.mark.usefixtures("small_chunks"),
    pytest.mark.filterwarnings("ignore:All-NaN"),  # requests that only fill up read slot 0
]


def test_spans_enter_and_leave_a_captured_batch(make_world, device):
    """Alone, shared, deep; grown in place; gone; and a batch that comes again."""
    world = make_world(2, 4, 16, num_token_slots=900)
    captured = Captured(world, 4, device)
    world.add((), 20)
    captured.check()
    shared, deep = world.uneven_span(30), world.uneven_span(18)
    world.add((shared,), 3)
    world.add((shared, deep), 40)
    captured.check()
    for i in range(3):
        world.grow(i, 7)
    captured.check()
    world.remove(0)
    world.add((deep, shared), 1)
    captured.check()
    world.remove(1)
    world.remove(0)
    captured.check()
    world.add((shared,), 5)
    world.add((), 33)
    world.add((shared, deep, world.uneven_span(40)), 2)
    captured.check()
    captured.check()


def test_sharers_beyond_one_tile_of_q_rows(make_world, device):
    """The tile of many sharers is captured, though a batch may have nothing for it."""
    world = make_world(1, 4, 16, num_token_slots=500)
    captured = Captured(world, 8, device)
    span = world.uneven_span(70)
    for sharers in (1, 4, 5, 8):
        while len(world.paths) < sharers:
            world.add((span,), len(world.paths) + 1)
        captured.check()


def test_scratch_that_grew_after_the_capture(make_world, device):
    """A step that was captured with little scratch finds the larger one; so does a batch that came before it grew."""
    world = make_world(2, 2, 16, num_token_slots=900)
    captured = Captured(world, 2, device)
    captured_rows = captured.attention._partials[0].shape[0]
    world.add((world.uneven_span(30),), 4)
    captured.check()
    world.add((world.span(torch.full((2, 2), 400, dtype=torch.int32), num_tokens=500),), 9)
    captured.check()
    assert captured.attention._partials[0].shape[0] > captured_rows
    world.remove(1)
    captured.check()


def test_eager_steps_between_replays(make_world, device):
    """A prefill between two decode steps leaves nothing behind that a replay reads."""
    world = make_world(2, 3, 16, num_token_slots=700)
    captured = Captured(world, 3, device)
    world.add((world.uneven_span(50),), 6)
    captured.check()
    world.add((world.uneven_span(30),), 40)
    q = world.queries([1, 33]).to(device)
    captured.attention.plan(captured.runner.batch([1, 33]))
    captured.attention.run(0, q, world.sm_scale)
    captured.check()


def test_trees_enter_and_leave_a_captured_batch(make_world, device):
    """Other trees at every replay, over spans that are shared, alone or gone."""
    world = make_world(2, 2, 16, num_layers=1, num_token_slots=900)
    captured = Captured(world, 3, device, new_len=5)
    shared = world.uneven_span(30)
    world.add((), 20)
    captured.check()
    world.add((shared,), 6)
    world.add((shared, world.uneven_span(18)), 40)
    captured.check()
    world.remove(0)
    for i in range(2):
        world.grow(i, 3)
    captured.check()


@pytest.mark.usefixtures("interpreted")
def test_a_captured_step_holds_only_memory_that_lasts(make_world):
    """Kernels read what is the graph's own or lives as long as the server: nothing of the warm-up or of a batch."""
    captured = Captured(make_world(2, 4, 16, num_token_slots=100), 4, "cpu")
    attention = captured.attention
    lasting = [attention.k_arena, attention.v_arena, attention._captured_addresses]
    lasting += [captured.seq_lens, captured.pool_rows, captured.req_to_token, captured.q]
    addresses = {x.untyped_storage().data_ptr() for x in lasting}
    assert {x.untyped_storage().data_ptr() for x in captured.tape.foreign} <= addresses
    per_layer = ["_split_kernel", "_merge_kernel"]
    assert captured.tape.kernels == ["suffix_work_kernel", *per_layer * 2]


@pytest.mark.usefixtures("interpreted")
def test_more_rows_than_a_small_tile_are_captured_with_both_tiles(make_world):
    """Which one a span needs is not known before its readers are."""
    captured = Captured(make_world(1, 4, 16, num_layers=1, num_token_slots=100), 5, "cpu")
    assert captured.tape.kernels == ["suffix_work_kernel", "_split_kernel", "_split_kernel", "_merge_kernel"]


def test_rows_that_no_kernel_is_compiled_for_are_refused(make_world):
    world = make_world(1, 1, 257, num_token_slots=2)
    with pytest.raises(UnsupportedSetupError, match="head_dim of at most 256; the model's is 257"):
        TritonAttention(world.geometry, world.k, world.v)


def test_a_replay_takes_decode_steps_that_fit(make_world):
    world = make_world()
    attention = TritonAttention(world.geometry, world.k, world.v)
    for _ in range(2):
        world.add((), 3)
    with pytest.raises(InvariantError, match=r"1 rows of 1 were captured, got \[1, 1\] new tokens"):
        attention.follow(world.batch(), 1)
    with pytest.raises(InvariantError, match=r"4 rows of 1 were captured, got \[1, 3\] new tokens"):
        attention.follow(world.batch([1, 3]), 4)
    with pytest.raises(UnsupportedSetupError, match="43 draft tokens in a captured step; allowed: 128 q rows"):
        attention.start_capture(2, 43)


def test_a_step_needs_a_plan(make_world):
    world = make_world()
    attention = TritonAttention(world.geometry, world.k, world.v)
    with pytest.raises(InvariantError, match="before a batch was planned"):
        attention.start_step(torch.ones(1), torch.zeros(1), world.req_to_token)
