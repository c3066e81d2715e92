"""Layers with a window, and sink logits: every implementation beside PyTorch's in float32."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers.captured_decode import Captured
from helpers.tolerance import assert_same_bits
from kvevict_kernels.ragged_decode.host_lists import SPLIT_ROWS
from sgl_kvevict.attention.cpu.long_prefill import WINDOW_BLOCK
from sgl_kvevict.attention.cpu.numba_attention import MAX_SHORT_TOKENS, NumbaAttention
from sgl_kvevict.attention.triton.attention import TritonAttention

WINDOWS = (0, 1, 7, 40, 1000)
"""No window; itself alone; less than a suffix; into the spans; more than there is."""


def random_world(world) -> None:
    """Paths that share their first spans, as the paths of a tree do; and requests without any."""
    first = world.uneven_span(25)
    second = world.uneven_span(20, start=first.num_tokens)
    third = world.uneven_span(9, start=first.num_tokens)
    empty = world.span(torch.zeros_like(first.lens), num_tokens=4, start=first.num_tokens + second.num_tokens)
    alone = world.uneven_span(60)
    world.add((), 20)
    world.add((first,), 12)
    world.add((first, second), 1)
    world.add((first, third), 9)
    world.add((first, second, empty), 30)
    world.add((alone,), 6)
    world.add((), 1)


@pytest.mark.parametrize(
    ("dtype", "has_sinks"), [(torch.float32, False), (torch.float32, True), (torch.bfloat16, True)], ids=str
)
def test_decode_sees_its_window(build, make_world, dtype, has_sinks):
    """Also after the windows have moved on: what was laid out for the batch still holds."""
    world = make_world(2, 4, 16, dtype=dtype, windows=WINDOWS, num_token_slots=1000)
    random_world(world)
    world.sink_logits = (2 * torch.randn(8) + 2).to(dtype) if has_sinks else None
    attention = build(world)
    world.check(attention)
    for i in range(len(world.paths)):
        world.grow(i, 2 + 5 * (i == 2))
    world.check(attention)


@pytest.mark.parametrize("has_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("windows", [(0, 7, 40), (300, 33, 1)], ids=str)
def test_prefills_see_their_windows(build, make_world, windows, has_sinks):
    """A question, more new tokens than a compiled call takes, one without a span, one token."""
    world = make_world(1, 2, 16, dtype=torch.float32, windows=windows, num_token_slots=2500)
    attention = build(world)
    is_triton = isinstance(attention, TritonAttention)
    news = [3, 20, SPLIT_ROWS // 2 + 1 if is_triton else MAX_SHORT_TOKENS + WINDOW_BLOCK, 5, 1, 70]
    shared = world.uneven_span(50)
    for new in news[:3]:
        world.add((shared, world.uneven_span(40, start=shared.num_tokens)), new + 4)
    world.add((), news[3] + 2)
    world.add((shared,), 3)
    world.add((), 90)
    world.sink_logits = torch.randn(2) if has_sinks else None
    world.check(attention, news)


def test_a_long_prompt_alone(build, make_world):
    """Several blocks of queries, of which only the first ones see the span, and parts of keys on a device."""
    world = make_world(1, 2, 16, dtype=torch.float32, windows=(50, 0), num_token_slots=1500)
    world.add((world.uneven_span(100),), 400)
    world.sink_logits = torch.randn(2)
    world.check(build(world), [380])


@pytest.mark.parametrize("extend_lens", [None, [1, 8, 1, 2, 25, 6, 1]], ids=["decode", "extend"])
def test_a_window_that_hides_nothing_is_none(build, make_world, extend_lens):
    """The same bits as without windows."""
    world = make_world(2, 4, 16, dtype=torch.float32, windows=(1000, 1000), num_token_slots=700)
    random_world(world)
    windowed = build(world)
    world.geometry = replace(world.geometry, windows=())
    full = build(world)
    for attention in (windowed, full):
        attention.plan(world.batch(extend_lens))
    q = world.queries(extend_lens)
    both = zip(("out", "lse"), windowed.run(1, q, world.sm_scale), full.run(1, q, world.sm_scale), strict=True)
    for name, got, want in both:
        assert_same_bits(name, got, want)


def test_what_no_window_shows_is_not_multiplied(make_world):
    """NaN in what is out of every reader's window reaches nobody, be it in a span or among own tokens."""
    world = make_world(2, 2, 16, dtype=torch.float32, windows=(30,), num_token_slots=900)
    span = world.span(torch.full((1, 2), 300), num_tokens=300)
    world.add((span,), 8)
    world.add((span,), 200)
    hidden = span.rows[span.positions < 300 + 8 - 30 - 64].long()
    for arena in (world.k, world.v):
        arena.view(-1, 16)[hidden] = torch.nan
    own = world.req_to_token[world.rows[1], 300:330].long()
    world.k[:, own], world.v[:, own] = torch.nan, torch.nan
    attention = NumbaAttention(world.geometry, world.k, world.v)
    attention.plan(world.batch())
    out, lse = attention.run(0, world.queries(), world.sm_scale)
    assert not out.isnan().any() and not lse.isnan().any()


@pytest.mark.usefixtures("interpreted", "small_chunks")
@pytest.mark.filterwarnings("ignore:All-NaN")  # requests that only fill up read slot 0
def test_a_captured_step_follows_the_windows(make_world):
    """Recorded launches take the queries' positions from each replay's lengths, the entries' from its tables."""
    world = make_world(2, 4, 16, dtype=torch.float32, windows=WINDOWS, num_token_slots=1000)
    world.sink_logits = torch.randn(8)
    random_world(world)
    num_requests = len(world.paths)
    captured = Captured(world, num_requests, "cpu")
    for _ in range(2):
        captured.check()
        for i in range(num_requests):
            world.grow(i, 3 * i)
        world.remove(0)
        world.add((world.paths[0][0],), 5)


def test_sink_logits_of_other_heads_are_refused(make_world):
    world = make_world(1, 2, 16, num_token_slots=100)
    world.add((), 4)
    attention = NumbaAttention(world.geometry, world.k, world.v)
    attention.plan(world.batch())
    with pytest.raises(ValueError, match="sink_logits"):
        attention.run(0, world.queries(), world.sm_scale, torch.zeros(3))
