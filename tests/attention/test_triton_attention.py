from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING
from unittest.mock import Mock, create_autospec

import pytest
import torch
from torch import Tensor

from helpers.poison import poisoned_allocations
from helpers.tolerance import FLOAT32_NOISE, assert_accurate, assert_same_bits, rounding_noise
from kvevict_kernels.device_limits import INTERPRETER
from kvevict_kernels.ragged_decode.host_lists import SPLIT_ROWS
from kvevict_kernels.ragged_decode.launch import plan_batch
from kvevict_kernels.span_runs import SpanRuns
from sgl_kvevict.attention import Attention, AttentionBatch, TorchAttention
from sgl_kvevict.attention.flashinfer.prefill import PlainPrefill
from sgl_kvevict.attention.flashinfer.wrapper import PagedPrefill
from sgl_kvevict.attention.triton.attention import TritonAttention
from sgl_kvevict.errors import InvariantError

if TYPE_CHECKING:
    from conftest import MakeWorld, World

NOISE = 4 * FLOAT32_NOISE
"""Two float32 softmaxes over a few hundred keys, in chunks or not."""


class Runner:
    """Attention on the test's device over copies of a world's arena, spans and rows."""

    def __init__(self, world: World, device: str) -> None:
        if device == "cuda" and world.dtype == torch.float32:
            pytest.skip("refused on a GPU; in the interpreter, float32 shows errors that rounding hides")
        self.world = world
        self.device = device
        k = world.k.to(device)
        v = k[..., : world.v.shape[-1]] if world.geometry.is_latent else world.v.to(device)
        self.attention = TritonAttention(world.geometry, k, v)
        self.copies: dict[SpanRuns, SpanRuns] = {}

    def batch(self, extend_lens: list[int] | None = None) -> AttentionBatch:
        """The world's batch, on the device; a span keeps its copy."""
        batch = self.world.batch(extend_lens)
        return replace(
            batch,
            paths=tuple(tuple(self._copy(span) for span in path) for path in batch.paths),
            req_pool_indices=batch.req_pool_indices.to(self.device),
            req_to_token=batch.req_to_token.to(self.device),
        )

    def attend(self, layer: int, q: Tensor, extend_lens: list[int] | None = None) -> tuple[Tensor, Tensor]:
        """Plan and run one layer; fresh allocations are NaN."""
        self.attention.k_arena.copy_(self.world.k)
        self.attention.v_arena.copy_(self.world.v)
        with poisoned_allocations():
            self.attention.plan(self.batch(extend_lens))
            out, lse = self.attention.run(layer, q.to(self.device), self.world.sm_scale)
        return out.cpu(), lse.cpu()

    def _copy(self, span: SpanRuns) -> SpanRuns:
        if span not in self.copies:
            tensors = (x.to(self.device) for x in (span.rows, span.starts, span.lens))
            self.copies[span] = SpanRuns(*tensors, span.num_tokens)
        return self.copies[span]


def check(runner: Runner, extend_lens: list[int] | None = None, layer: int = 1) -> None:
    """Compare a layer with the plain implementation in float32."""
    world = runner.world
    q = world.queries(extend_lens)
    out, lse = runner.attend(layer, q, extend_lens)
    want_out, want_lse, baseline = world.expected(layer, q, extend_lens)
    noise = max(NOISE, rounding_noise(q.dtype, interpreted=runner.device == "cpu"))
    assert out.dtype == q.dtype
    assert_accurate("out", out, want_out, baseline, noise=noise)
    assert_accurate("lse", lse, want_lse, want_lse, noise=NOISE)


def finest(device: str) -> torch.dtype:
    """The dtype of KV with the least rounding that the device's kernels take."""
    return torch.bfloat16 if device == "cuda" else torch.float32


def mixed_batch(world: World) -> None:
    """Nothing compressed; one span; spans shared by some; only empty runs; a suffix of one."""
    shared, deep = world.uneven_span(40), world.uneven_span(21)
    empty = world.span(torch.zeros(2, world.geometry.num_kv_heads, dtype=torch.int32), num_tokens=1)
    world.add((), 50)
    world.add((world.uneven_span(70),), 17)
    world.add((shared, deep), 1)
    world.add((empty, world.uneven_span(5), shared), 33)
    world.add((deep, shared), 7)
    world.add((empty,), 1)


@pytest.mark.parametrize("sizes", [(3, 3, 16), (2, 4, 32), (1, 8, 16), (2, 5, 80)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.usefixtures("small_chunks")
def test_decode(make_world: MakeWorld, device: str, sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    """GQA of 3, 4, 5 and 8 q heads; uneven layers and heads."""
    world = make_world(*sizes, dtype=dtype, num_token_slots=500)
    mixed_batch(world)
    check(Runner(world, device))


def test_decode_with_the_real_chunks(make_world: MakeWorld, device: str) -> None:
    world = make_world(1, 4, 16, num_token_slots=2200)
    span = world.span(torch.tensor([[30], [700]], dtype=torch.int32), num_tokens=800)
    world.add((span,), 600)
    check(Runner(world, device))


@pytest.mark.parametrize("sharers", [4, 9])
@pytest.mark.usefixtures("small_chunks")
def test_sharers_read_a_span_once(make_world: MakeWorld, device: str, sharers: int) -> None:
    """Work items of a shared span do not grow with its sharers while their q rows fit one tile."""
    world = make_world(2, 4, 16, num_token_slots=300)
    span = world.uneven_span(60)
    for i in range(sharers):
        world.add((span,), 1 + i)
    runner = Runner(world, device)
    check(runner)
    assert runner.attention._planned is not None
    tables = runner.attention._planned.addresses.tables
    which = int(sharers * 4 > 16)
    chunk = int(tables.span_chunk)
    items = tables.classes[which].item_count.tolist()
    assert items == ((span.lens + chunk - 1) // chunk).sum(1).tolist()
    assert tables.classes[1 - which].item_count.tolist() == [0, 0]


@pytest.mark.usefixtures("small_chunks")
def test_extends_short_and_long_and_decode_rows(make_world: MakeWorld, device: str) -> None:
    """Short ones are split over their keys, long ones are not; a span is read by rows of all three kinds."""
    world = make_world(2, 4, 16, num_token_slots=600)
    shared = world.uneven_span(40)
    num_long = SPLIT_ROWS // 4 + 5
    world.add((shared,), 9)
    world.add((world.uneven_span(20), shared), 11 + 7)
    world.add((shared,), 20 + num_long)
    world.add((), 33)
    world.add((), 3)
    check(Runner(world, device), [1, 7, num_long, 33, 2])


@pytest.fixture
def many_sms(monkeypatch: pytest.MonkeyPatch, small_chunks: None) -> None:
    """A device that a few tiles do not fill."""
    limits = replace(INTERPRETER, num_sms=20)
    monkeypatch.setattr("kvevict_kernels.ragged_decode.launch.limits_of", lambda device: limits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.usefixtures("many_sms")
def test_keys_of_a_few_tiles_are_split(make_world: MakeWorld, device: str, dtype: torch.dtype) -> None:
    """Parts that begin and end in the middle of runs, or hold nothing of a head; requests of other lengths beside."""
    world = make_world(2, 3, 16, num_token_slots=900, dtype=dtype)
    empty = world.span(torch.zeros(2, 2, dtype=torch.int32), num_tokens=1)
    shared = world.uneven_span(70)
    world.add((shared, empty, world.uneven_span(33)), 61)
    world.add((), 150)
    world.add((shared,), 5)
    runner = Runner(world, device)
    new_lens = [45, 150, 1]
    check(runner, new_lens)
    assert runner.attention._planned is not None
    splits = runner.attention._planned.addresses.tables.num_splits.tolist()
    assert splits[0] > 3 and splits[1] > 1 and splits[2] == 0
    q = world.queries(new_lens)
    out, lse = runner.attend(1, q, new_lens)
    for i in (2, 1):
        for per_request in (world.paths, world.compressed_lens, world.seq_lens, world.rows):
            del per_request[i]
    alone = runner.attend(1, q[:45], [45])
    assert_same_bits("out", alone[0], out[:45])
    assert_same_bits("lse", alone[1], lse[:45])


@pytest.mark.usefixtures("small_chunks")
def test_queries_are_read_out_of_a_fused_projection(make_world: MakeWorld, device: str) -> None:
    world = make_world(2, 4, 16, num_token_slots=300)
    world.add((world.uneven_span(30),), 40)
    world.add((world.uneven_span(30),), 4)
    runner = Runner(world, device)
    q = world.queries([36, 2])
    want = runner.attend(0, q, [36, 2])
    fused = torch.full((38, q.shape[1] + 4, q.shape[2]), torch.nan, dtype=q.dtype)
    fused[:, : q.shape[1]] = q
    got = runner.attention.run(0, fused.to(device)[:, : q.shape[1]], world.sm_scale)
    assert_same_bits("out", got[0].cpu(), want[0])
    assert_same_bits("lse", got[1].cpu(), want[1])


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        ((4, 48, 32), torch.float32),
        ((16, 576, 512), torch.float32),
        ((128, 576, 512), torch.bfloat16),
    ],
    ids=str,
)
@pytest.mark.usefixtures("small_chunks")
def test_latents(make_world: MakeWorld, device: str, sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Values begin the keys' rows, of one head that 4 to 128 query heads read: decode, then new tokens of all kinds.

    Sharers of a span; an empty one; a single entry; prefills whose new tokens end in the middle of a block of keys.
    """
    group, head_dim, latent_dim = sizes
    world = make_world(1, group, head_dim, dtype=dtype, num_token_slots=300, latent_dim=latent_dim)
    empty = world.span(torch.zeros(2, 1, dtype=torch.int32), num_tokens=1)
    single = world.span(torch.ones(2, 1, dtype=torch.int32), num_tokens=9)
    shared = world.span(torch.tensor([[3], [41]], dtype=torch.int32), num_tokens=50)
    num_long = SPLIT_ROWS // group + 1
    world.add((), num_long + 3)
    world.add((empty, shared), 5)
    for i in range(3):
        world.add((shared, single), 1 + i)
    runner = Runner(world, device)
    check(runner)
    check(runner, [num_long, 5, 1, 2, 1])


@pytest.mark.usefixtures("many_sms")
def test_keys_of_latents_are_split(make_world: MakeWorld, device: str) -> None:
    world = make_world(1, 128, 48, num_token_slots=400, dtype=finest(device), latent_dim=32)
    shared = world.uneven_span(60)
    world.add((shared, world.uneven_span(33)), 40)
    runner = Runner(world, device)
    check(runner, [3])
    assert runner.attention._planned is not None
    assert runner.attention._planned.addresses.tables.has_splits


def test_extend_longer_than_a_tile(make_world: MakeWorld, device: str) -> None:
    world = make_world(1, 3, 16, num_token_slots=400, dtype=finest(device))
    world.add((world.uneven_span(70),), 30 + 100)
    check(Runner(world, device), [100])


@pytest.mark.usefixtures("small_chunks")
def test_a_row_does_not_depend_on_its_batch(
    make_world: MakeWorld, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits alone, in another batch, beside another reader of its span, and on another grid."""
    world = make_world(2, 4, 16, num_token_slots=500)
    mixed_batch(world)
    runner = Runner(world, device)
    q = world.queries()
    out, lse = runner.attend(1, q)
    monkeypatch.setattr("kvevict_kernels.ragged_decode.triton_impl._num_programs", lambda *args: 7)
    for i in (4, 3, 0):
        for per_request in (world.paths, world.compressed_lens, world.seq_lens, world.rows):
            del per_request[i]
    kept = [1, 2, 5]
    again = runner.attend(1, q[kept])
    assert_same_bits("out", again[0], out[kept])
    assert_same_bits("lse", again[1], lse[kept])


@pytest.mark.usefixtures("small_chunks")
def test_a_step_keeps_the_tables(make_world: MakeWorld, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Suffixes grow over chunk borders, then a request leaves; lengths may come from the device."""
    world = make_world(1, 3, 16, num_token_slots=300)
    shared = world.uneven_span(30)
    world.add((shared,), 15)
    world.add((shared,), 2)
    runner = Runner(world, device)
    plan = Mock(wraps=plan_batch)
    monkeypatch.setattr("sgl_kvevict.attention.triton.attention.plan_batch", plan)
    for _ in range(3):
        check(runner)
        world.grow(0, 1)
        world.grow(1, 9)
    assert plan.call_count == 1
    q = world.queries()
    want = runner.attend(0, q)
    wrong_on_host = replace(runner.batch(), device_seq_lens=torch.tensor(world.seq_lens, device=device))
    runner.attention.plan(wrong_on_host)
    got = runner.attention.run(0, q.to(device), world.sm_scale)
    assert_same_bits("out", got[0].cpu(), want[0])
    world.remove(0)
    check(runner)
    assert plan.call_count == 2


def test_other_queries_than_planned(make_world: MakeWorld) -> None:
    world = make_world(num_token_slots=50)
    attention: Attention = TritonAttention(world.geometry, world.k, world.v)
    with pytest.raises(InvariantError, match=r"q: planned \[0, 9, 64\], got \[1, 9, 64\]"):
        attention.run(0, torch.zeros(1, 9, 64), 0.1)
    attention = TorchAttention(world.geometry, world.k, world.v)
    assert attention.geometry is world.geometry


@pytest.mark.usefixtures("flashinfer_plans")
def test_long_prefills_without_spans_go_elsewhere(
    make_world: MakeWorld, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashInfer gets the requests that read no span, ours the others; in a block, and apart from each other."""
    world = make_world(2, 4, 64, num_token_slots=900)
    world.add((), 3)
    world.add((world.uneven_span(40),), 50)
    world.add((), 60)
    world.add((), 41)
    runner = Runner(world, device)
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
    check(runner, [3, 40, 1, 41])
    check(runner, [3, 33, 45, 2])
    check(runner)


@pytest.mark.usefixtures("flashinfer_plans")
def test_prefills_without_spans_that_lie_apart(make_world: MakeWorld, device: str) -> None:
    world = make_world(2, 4, 64, num_token_slots=900)
    world.add((), 44)
    world.add((world.uneven_span(40),), 50)
    world.add((), 60)
    runner = Runner(world, device)
    arenas = (runner.attention.k_arena, runner.attention.v_arena)
    plain = PlainPrefill(world.geometry, *arenas)
    runner.attention = TritonAttention(world.geometry, *arenas, plain_prefill=plain)
    check(runner, [40, 36, 45])
