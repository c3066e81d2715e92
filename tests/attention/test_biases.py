"""Spans whose entries have biases: every implementation beside the plain one; without biases nothing changes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from helpers.poison import poisoned_allocations
from helpers.tolerance import FLOAT32_NOISE, assert_accurate, assert_same_bits, rounding_noise
from kvevict_kernels.ragged_decode.host_lists import SPLIT_ROWS
from sgl_kvevict.attention import Attention, build_attention
from sgl_kvevict.attention.cpu.numba_attention import MAX_SHORT_TOKENS
from sgl_kvevict.attention.refusals import bias_reasons
from sgl_kvevict.attention.triton.attention import TritonAttention
from sgl_kvevict.errors import UnsupportedSetupError

if TYPE_CHECKING:
    from conftest import Build, MakeWorld, World

NOISE = 8 * FLOAT32_NOISE
"""Two float32 softmaxes over a few hundred keys, with scores up to twice as large as without biases."""


def attend(world: World, attention: Attention, extend_lens: list[int] | None, qs: list[Tensor]) -> list[Tensor]:
    """All layers' results, out and lse in turn; fresh allocations are NaN."""
    results = []
    attention.plan(world.batch(extend_lens))
    for layer, q in enumerate(qs):
        with poisoned_allocations():
            results.extend(attention.run(layer, q, world.sm_scale))
    return results


def check(world: World, attention: Attention, extend_lens: list[int] | None = None) -> None:
    """Compare all layers with the plain implementation in float32."""
    qs = [world.queries(extend_lens) for _ in range(world.geometry.num_layers)]
    results = attend(world, attention, extend_lens, qs)
    noise = max(NOISE, rounding_noise(world.dtype, interpreted=isinstance(attention, TritonAttention)))
    for layer, q in enumerate(qs):
        want_out, want_lse, baseline = world.expected(layer, q, extend_lens)
        assert_accurate("out", results[2 * layer], want_out, baseline, noise=noise)
        assert_accurate("lse", results[2 * layer + 1], want_lse, want_lse, noise=NOISE)


def mixed(world: World) -> None:
    """Fitted spans alone, shared, before and after spans that are not fitted; and requests without any."""
    shared, unfitted = world.fitted_span(40), world.uneven_span(21)
    world.add((), 20)
    world.add((world.fitted_span(60),), 30)
    world.add((shared, unfitted), 12)
    world.add((unfitted, shared), 15)
    world.add((shared,), 10)
    world.add((unfitted,), 11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_decode_adds_biases(build: Build, make_world: MakeWorld, dtype: torch.dtype) -> None:
    """Shared spans are read once for all; own tokens have no bias (theirs are NaN in the arena)."""
    world = make_world(2, 4, 16, dtype=dtype, num_token_slots=900)
    mixed(world)
    check(world, build(world))


def test_a_few_requests_that_share_nothing(build: Build, make_world: MakeWorld) -> None:
    world = make_world(3, 3, 16, dtype=torch.float32, num_token_slots=900)
    world.add((world.fitted_span(30), world.uneven_span(17)), 9)
    world.add((world.fitted_span(50),), 9)
    check(world, build(world))


def test_short_and_long_prefills_add_biases(build: Build, make_world: MakeWorld) -> None:
    """A question, more new tokens than a compiled call takes, and one that reads no span."""
    world = make_world(1, 2, 16, dtype=torch.float32, num_layers=1, num_token_slots=1500)
    is_triton = isinstance(build(world), TritonAttention)
    news = [3, 20, SPLIT_ROWS // 2 + 1 if is_triton else MAX_SHORT_TOKENS + 1, 5]
    for new in news[:-1]:
        world.add((world.fitted_span(40), world.uneven_span(12)), new + 4)
    world.add((), news[-1] + 2)
    check(world, build(world), news)


@pytest.mark.parametrize("extend_lens", [None, [1, 20, 3, 2, 2, 1]], ids=["decode", "extend"])
def test_a_bias_of_zero_is_no_bias(build: Build, make_world: MakeWorld, extend_lens: list[int] | None) -> None:
    """The same bits without biases, with fitted spans whose biases are 0, and with spans that are not fitted."""
    world = make_world(2, 4, 16, num_layers=1, num_token_slots=700)
    mixed(world)
    if extend_lens is not None:
        world.grow(1, 10)
    world.biases[~world.biases.isnan()] = 0.0
    qs = [world.queries(extend_lens) for _ in range(world.geometry.num_layers)]
    zero = attend(world, build(world), extend_lens, qs)
    unfitted = {span: replace(span, is_fitted=False) for path in world.paths for span in path}
    world.paths = [tuple(unfitted[span] for span in path) for path in world.paths]
    for biases in (None, world.biases):
        world.biases = biases
        for got, want in zip(attend(world, build(world), extend_lens, qs), zero, strict=True):
            assert_same_bits("result", got, want)


def test_a_new_fit_is_read_by_the_next_plan(build: Build, make_world: MakeWorld) -> None:
    """What is laid out for a batch belongs to its spans; a fitted span is another one."""
    world = make_world(2, 2, 16, dtype=torch.float32, num_token_slots=900)
    span = world.uneven_span(40)
    world.add((span,), 10)
    world.add((span, world.uneven_span(9)), 10)
    attention = build(world)
    check(world, attention)
    world.biases.view(-1)[span.head_slots.long()] = torch.randn(span.head_slots.numel())
    fitted = replace(span, is_fitted=True)
    world.paths = [tuple(fitted if each is span else each for each in path) for path in world.paths]
    check(world, attention)


@pytest.mark.usefixtures("interpreted", "small_chunks")
def test_a_captured_step_reads_biases(make_world: MakeWorld) -> None:
    """A recorded launch keeps the pointer to the biases, and finds those of other spans."""
    world = make_world(2, 4, 16, dtype=torch.float32, num_token_slots=900)
    mixed(world)
    attention = TritonAttention(world.geometry, world.k, world.v, biases=world.biases)
    num_requests = len(world.paths)
    attention.start_capture(num_requests)
    attention.follow(world.batch(), num_requests)
    attention.start_step(torch.tensor(world.seq_lens), torch.tensor(world.rows), world.req_to_token)
    q = world.queries()
    out, lse = attention.run(1, q, world.sm_scale)
    want_out, want_lse, baseline = world.expected(1, q)
    assert_accurate("out", out, want_out, baseline, noise=NOISE)
    assert_accurate("lse", lse, want_lse, want_lse, noise=NOISE)


@pytest.mark.usefixtures("flashinfer_is_chosen")
def test_what_cannot_read_biases_is_refused(make_world: MakeWorld) -> None:
    """FlashInfer has no place for them: that is said by name, and nothing is built."""
    world = make_world(1, 1, 64, num_token_slots=10)
    with pytest.raises(UnsupportedSetupError, match="'flashinfer', which cannot read the biases of fitted prefixes"):
        build_attention("flashinfer", world.geometry, world.k, world.v, biases=world.biases)


def test_reasons_name_what_cannot_be_fitted() -> None:
    """Before anything is built, with every other reason."""
    assert bias_reasons("auto", torch.float32) == [] == bias_reasons("triton", torch.bfloat16)
    assert "'flashinfer'" in bias_reasons("flashinfer", torch.bfloat16)[0]
    (reason,) = bias_reasons("auto", torch.float8_e4m3fn)
    assert "float8" in reason and "--kv-cache-dtype auto" in reason


@pytest.mark.parametrize("wrong", ["shape", "dtype"])
def test_biases_of_another_arena_are_refused(build: Build, make_world: MakeWorld, wrong: str) -> None:
    """Checked where the attention is built."""
    world = make_world(1, 1, 16, num_token_slots=10)
    world.biases = world.biases[:1] if wrong == "shape" else world.biases.half()
    with pytest.raises(ValueError, match="biases"):
        build(world)
