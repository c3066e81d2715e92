"""Every implementation of attention beside PyTorch's in float32."""

from __future__ import annotations

import pytest
import torch

from helpers.implementations import (
    FLASHINFER,
    FP32,
    KINDS,
    NOISE,
    NUMBA,
    ON_CPU,
    PLAIN,
    add_all_kinds,
    add_all_prefills,
    all_sizes,
)
from helpers.tolerance import assert_accurate, assert_same_bits
from kvevict_kernels.span_runs import SpanRuns
from sgl_kvevict.attention.batch import AttentionBatch
from sgl_kvevict.attention.cpu.torch_attention import QUERY_BLOCK
from sgl_kvevict.errors import InvariantError

# ---- all implementations -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "sizes", "dtype"), all_sizes(is_extend=False))
def test_decode_of_every_kind_of_request(start, kind, sizes, dtype):
    runner, world = start(kind, *sizes, dtype=dtype)
    add_all_kinds(world, kind.share)
    runner.check()


@pytest.mark.parametrize(("kind", "sizes", "dtype"), all_sizes(is_extend=True))
def test_extend_of_every_kind(start, kind, sizes, dtype):
    runner, world = start(kind, *sizes, dtype=dtype)
    runner.check(add_all_prefills(world, kind.share))


@pytest.mark.parametrize("kind", KINDS)
def test_steps_and_changing_batches(start, kind):
    """Suffixes grow, requests come and go, their slots are used again."""
    runner, world = start(kind, *kind.sizes[0], num_token_slots=900)
    shared = world.uneven_span(60)
    world.add((shared,), 30)
    world.add((shared, world.uneven_span(40)), 1)
    runner.check()
    for step in range(8):
        for i in range(len(world.paths)):
            world.grow(i, 1 + step % 3)
        if step == 3:
            world.add((shared,), 3)
        if step == 5:
            world.remove(0)
        runner.check()


@pytest.mark.parametrize("kind", KINDS)
def test_a_slice_of_a_fused_projection_is_a_valid_query(start, kind):
    """Bit for bit what contiguous queries give; so are heads that lie before tokens, on a CPU."""
    runner, world = start(kind, *kind.sizes[0])
    world.add((world.uneven_span(30),), 20)
    world.add((world.uneven_span(30),), 9)
    for extend_lens in (None, [6, 2]):
        q = world.queries(extend_lens)
        want = runner.attend(0, q, extend_lens)
        fused = torch.full((len(q), q.shape[1] + 4, q.shape[2]), torch.nan, dtype=q.dtype)
        fused[:, : q.shape[1]] = q
        others = [fused.to(kind.device)[:, : q.shape[1]]]
        if kind in (PLAIN, NUMBA):
            others.append(q.transpose(0, 1).contiguous().transpose(0, 1))
        for other in others:
            assert not other.is_contiguous()
            for name, got, expected in zip(("out", "lse"), runner.run(0, other), want, strict=True):
                assert_same_bits(name, got, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_other_queries_than_planned_are_refused(start, kind):
    runner, world = start(kind, 2, 4, 64)
    world.add((), 20)
    if kind is not FLASHINFER:
        with pytest.raises(InvariantError, match=r"q: planned \[(-1|0), 8, 64\]"):
            runner.run(0, world.queries())
    runner.plan()
    with pytest.raises(InvariantError, match=r"q: planned \[1, 8, 64\], got \[2, 8, 64\]"):
        runner.run(0, torch.zeros(2, 8, 64))


# ---- implementations on a CPU ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ON_CPU)
@pytest.mark.parametrize("num_uncompressed", [1, 15, 16, 17, 63, 64, 65, 255, 256, 257, 1400])
def test_decode_without_spans(start, kind, num_uncompressed):
    runner, world = start(kind)
    world.add((), num_uncompressed)
    runner.check()


@pytest.mark.parametrize("kind", ON_CPU)
@pytest.mark.parametrize("num_requests", [2, 5, 20])
def test_decode_on_one_shared_span(start, kind, num_requests):
    runner, world = start(kind)
    span = world.uneven_span(600)
    for i in range(num_requests):
        world.add((span,), 1 + 5 * i)
    runner.check()


@pytest.mark.parametrize("kind", ON_CPU)
@pytest.mark.parametrize("new", [2, 16, 17, 100, QUERY_BLOCK, QUERY_BLOCK + 1])
def test_extend_one_request(start, kind, new):
    runner, world = start(kind, 1, 2, 16, num_layers=1, dtype=FP32)
    world.add((world.uneven_span(150),), 50 + new)
    runner.check([new])


@pytest.mark.parametrize("kind", ON_CPU)
def test_queries_in_another_dtype_than_the_arena(start, kind):
    """The arena decides what is stored, the model what it computes in."""
    runner, world = start(kind)
    span = world.uneven_span(100)
    world.add((span,), 20)
    world.add((span,), 70)
    for extend_lens in (None, [5, 60]):
        q = world.queries(extend_lens).float()
        out, lse = runner.attend(1, q, extend_lens)
        want_out, want_lse, _ = world.expected(1, q, extend_lens)
        assert out.dtype == torch.float32
        assert_accurate("out", out, want_out, want_out, noise=NOISE)
        assert_accurate("lse", lse, want_lse, want_lse, noise=NOISE)


EMPTY_RUNS = torch.zeros(1, 1, dtype=torch.int32)
NOTHING = torch.zeros(0, dtype=torch.int32)
ALL_FOUR = SpanRuns(NOTHING, EMPTY_RUNS, EMPTY_RUNS, 4, NOTHING)


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
def test_contradicting_lengths_are_refused(change, message):
    batch: dict[str, object] = {"paths": ((),), "seq_lens": [4], "extend_lens": None}
    batch |= {"req_pool_indices": torch.zeros(1), "req_to_token": torch.zeros(1, 1500, dtype=torch.int32), **change}
    with pytest.raises(InvariantError, match=message):
        AttentionBatch(**batch)  # type: ignore[arg-type]
