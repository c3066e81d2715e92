"""Rows stored as float8_e4m3fn: each is worth what its own layer's scale says, in whatever plane it lies."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers.poison import poisoned_allocations
from helpers.tolerance import FLOAT32_NOISE, assert_accurate, assert_same_bits, rounding_noise
from kvevict_kernels.checks import FP8
from kvevict_kernels.ragged_decode.host_lists import SPLIT_ROWS
from sgl_kvevict.attention.triton.attention import TritonAttention
from sgl_kvevict.geometry import KVScales

pytestmark = pytest.mark.usefixtures("interpreted", "small_chunks")
SCALES = KVScales(k=(0.37, 1.9), v=(3.1, 0.21))
NOISE = 4 * FLOAT32_NOISE


def filled(make_world, dtype: torch.dtype):
    """A world of numbers that float8 has, and attention over them as stored; spans lie across layers."""
    world = make_world(2, 3, 16, dtype=dtype, num_token_slots=900)
    shared, empty = world.uneven_span(70), world.span(torch.zeros(2, 2, dtype=torch.int32), num_tokens=1)
    world.add((shared, empty, world.uneven_span(33)), SPLIT_ROWS // 3 + 60)
    world.add((), 150)
    world.add((shared,), 5)
    for _ in range(8):
        world.add((shared,), 2)
    stored = [(2 * arena).to(FP8) for arena in (world.k, world.v)]
    for arena, rows in zip((world.k, world.v), stored, strict=True):
        arena.copy_(rows.to(dtype))
    return world, TritonAttention(replace(world.geometry, scales=SCALES), *stored, q_dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["decode", "extend", "split extend"])
def test_beside_dense_attention_in_float32(make_world, request, kind, dtype):
    """Sharers that fill the larger tile, few new tokens, many with their keys split or not."""
    if kind == "split extend":
        request.getfixturevalue("many_sms")
    world, attention = filled(make_world, dtype)
    new_lens = None if kind == "decode" else [SPLIT_ROWS // 3 + 2, 150, 3, *[1] * 8]
    sm_scale = world.sm_scale
    for layer in (0, 1):
        q = world.queries(new_lens)
        with poisoned_allocations():
            attention.plan(world.batch(new_lens))
            out, lse = attention.run(layer, q, sm_scale)
        k_scale, v_scale = SCALES.of(layer)
        world.sm_scale = sm_scale * k_scale
        want_out, want_lse, baseline = world.expected(layer, q, new_lens)
        noise = max(NOISE, rounding_noise(dtype, interpreted=True))
        assert out.dtype == dtype
        assert_accurate("out", out, want_out * v_scale, baseline.float() * v_scale, noise=noise)
        assert_accurate("lse", lse, want_lse, want_lse, noise=NOISE)


def test_without_scales_the_same_bits_as_rows_of_16_bits(make_world):
    """Float8 becomes the queries' dtype exactly, before anything is multiplied."""
    world, attention = filled(make_world, torch.bfloat16)
    plain = TritonAttention(world.geometry, world.k, world.v)
    stored = TritonAttention(world.geometry, attention.k_arena, attention.v_arena)
    assert stored.q_dtype == torch.bfloat16
    q = world.queries()
    results = []
    for one in (plain, stored):
        one.plan(world.batch())
        results.append(one.run(1, q, world.sm_scale))
    assert_same_bits("out", results[1][0], results[0][0])
    assert_same_bits("lse", results[1][1], results[0][1])
