"""Decode steps that a graph recorded follow requests to other spans; on a CPU a tape stands in for the graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from helpers.graph_tape import GraphTape, recorded
from helpers.tolerance import assert_same_bits
from kvevict_kernels.span_runs import SpanRuns
from sgl_kvevict.attention.batch import AttentionBatch
from sgl_kvevict.attention.triton.attention import TritonAttention
from sgl_kvevict.errors import InvariantError, UnsupportedSetupError

if TYPE_CHECKING:
    from conftest import MakeWorld, World

pytestmark = [
    pytest.mark.usefixtures("small_chunks"),
    pytest.mark.filterwarnings("ignore:All-NaN"),  # requests that only fill up read slot 0
]


class Captured:
    """A recorded step of all layers for so many requests, on the arena of a world; with ``new_len`` > 1, of trees."""

    def __init__(self, world: World, num_requests: int, device: str, new_len: int = 1) -> None:
        self.world = world
        self.new_len = new_len
        self.device = device
        geometry = world.geometry
        self.attention = TritonAttention(geometry, world.k.to(device), world.v.to(device))
        self.eager = TritonAttention(geometry, self.attention.k_arena, self.attention.v_arena)
        self.copies: dict[SpanRuns, SpanRuns] = {}
        self.num_requests = num_requests
        self.seq_lens = torch.ones(num_requests, dtype=torch.int64, device=device)
        self.pool_rows = torch.zeros(num_requests, dtype=torch.int64, device=device)
        self.req_to_token = world.req_to_token.to(device).clone()
        shape = (geometry.num_layers, num_requests * new_len, geometry.num_qo_heads, geometry.head_dim)
        self.q = torch.zeros(shape, dtype=world.dtype, device=device)
        self.visible = torch.ones(num_requests * new_len, dtype=torch.int64, device=device)
        self.tape = GraphTape()
        self.attention.start_capture(num_requests, new_len)
        self.results, self._replay = recorded(self._step, self.tape, device)

    def _step(self) -> list[tuple[Tensor, Tensor]]:
        ends, visible = (self.seq_lens, None) if self.new_len == 1 else (self.seq_lens + self.new_len, self.visible)
        self.attention.start_step(ends, self.pool_rows, self.req_to_token, visible)
        return [self.attention.run(layer, q, self.world.sm_scale) for layer, q in enumerate(self.q)]

    def check(self) -> None:
        """Replay the world's batch, filled up, and compare with an eager step of it, bit by bit."""
        world = self.world
        num_real = len(world.paths)
        padding = self.num_requests - num_real
        self.attention.k_arena.copy_(world.k)
        self.attention.v_arena.copy_(world.v)
        self.req_to_token.copy_(world.req_to_token)
        self.q.copy_(torch.randn(self.q.shape).to(self.q.dtype))
        before = 0 if self.new_len == 1 else self.new_len  # SGLang counts drafts apart
        self.seq_lens.copy_(torch.tensor([length - before for length in world.seq_lens] + [1] * padding))
        self.visible[: num_real * self.new_len] = self._trees(num_real)
        self.pool_rows.copy_(torch.tensor(world.rows + [0] * padding))
        batch = self._batch()
        self.attention.follow(batch, self.num_requests)
        self._replay()
        self.eager.plan(batch)
        for layer, (out, lse) in enumerate(self.results):
            real = slice(num_real * self.new_len)
            want_out, want_lse = self.eager.run(layer, self.q[layer, real], world.sm_scale)
            assert want_out.isfinite().all()
            assert_same_bits(f"out of layer {layer}", out[real], want_out)
            assert_same_bits(f"lse of layer {layer}", lse[real], want_lse)

    def _batch(self) -> AttentionBatch:
        batch = self.world.batch()
        paths = tuple(tuple(self._copy(span) for span in path) for path in batch.paths)
        rows, num_real = batch.req_pool_indices.to(self.device), len(paths)
        if self.new_len == 1:
            return AttentionBatch(paths, batch.seq_lens, None, rows, self.req_to_token)
        news, visible = [self.new_len] * num_real, self.visible[: num_real * self.new_len].clone()
        return AttentionBatch(paths, batch.seq_lens, news, rows, self.req_to_token, visible=visible)

    def _trees(self, num_trees: int) -> Tensor:
        """Bits of random trees: every node has a parent among those before it."""
        numbers = []
        for _ in range(num_trees):
            tree = [1]
            for node in range(1, self.new_len):
                tree.append(tree[int(torch.randint(node, ()))] | 1 << node)
            numbers += tree
        return torch.tensor(numbers)

    def _copy(self, span: SpanRuns) -> SpanRuns:
        if span not in self.copies:
            of_span = {name: getattr(span, name).to(self.device) for name in ("rows", "starts", "lens", "positions")}
            self.copies[span] = SpanRuns(**of_span, num_tokens=span.num_tokens)
        return self.copies[span]


def test_spans_enter_and_leave_a_captured_batch(make_world: MakeWorld, device: str) -> None:
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


def test_sharers_beyond_one_tile_of_q_rows(make_world: MakeWorld, device: str) -> None:
    """The tile of many sharers is captured, though a batch may have nothing for it."""
    world = make_world(1, 4, 16, num_token_slots=500)
    captured = Captured(world, 8, device)
    span = world.uneven_span(70)
    for sharers in (1, 4, 5, 8):
        while len(world.paths) < sharers:
            world.add((span,), len(world.paths) + 1)
        captured.check()


def test_scratch_that_grew_after_the_capture(make_world: MakeWorld, device: str) -> None:
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


def test_eager_steps_between_replays(make_world: MakeWorld, device: str) -> None:
    """A prefill between two decode steps leaves nothing behind that a replay reads."""
    world = make_world(2, 3, 16, num_token_slots=700)
    captured = Captured(world, 3, device)
    world.add((world.uneven_span(50),), 6)
    captured.check()
    world.add((world.uneven_span(30),), 40)
    q = world.queries([1, 33]).to(device)
    batch = captured._batch()
    extend = AttentionBatch(batch.paths, batch.seq_lens, [1, 33], batch.req_pool_indices,
                            batch.req_to_token)  # fmt: skip
    captured.attention.plan(extend)
    captured.attention.run(0, q, world.sm_scale)
    captured.check()


def test_trees_enter_and_leave_a_captured_batch(make_world: MakeWorld, device: str) -> None:
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
def test_a_captured_step_holds_only_memory_that_lasts(make_world: MakeWorld) -> None:
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
def test_more_rows_than_a_small_tile_are_captured_with_both_tiles(make_world: MakeWorld) -> None:
    """Which one a span needs is not known before its readers are."""
    captured = Captured(make_world(1, 4, 16, num_layers=1, num_token_slots=100), 5, "cpu")
    assert captured.tape.kernels == ["suffix_work_kernel", "_split_kernel", "_split_kernel", "_merge_kernel"]


def test_rows_that_no_kernel_is_compiled_for_are_refused(make_world: MakeWorld) -> None:
    world = make_world(1, 1, 257, num_token_slots=2)
    with pytest.raises(UnsupportedSetupError, match="head_dim of at most 256; the model's is 257"):
        TritonAttention(world.geometry, world.k, world.v)


def test_a_replay_takes_decode_steps_that_fit(make_world: MakeWorld) -> None:
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


def test_a_step_needs_a_plan(make_world: MakeWorld) -> None:
    world = make_world()
    attention = TritonAttention(world.geometry, world.k, world.v)
    with pytest.raises(InvariantError, match="before a batch was planned"):
        attention.start_step(torch.ones(1), torch.zeros(1), world.req_to_token)
