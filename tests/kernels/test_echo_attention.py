"""Attention that a prompt would pay itself, read once more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.references import echo_attention_reference
from kvevict_kernels.echo_attention import echo_attention
from kvevict_kernels.rotary import Rotary

HEAD_DIM, NUM_HEADS, GROUP, LENGTH = 8, 2, 3, 50
SMALL = {"block": 8, "num_blocks": 2, "num_sinks": 2}


def rotary(device: str, scale: float = 1.0) -> Rotary:
    angles = torch.arange(200.0)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.03])
    return Rotary((torch.cat([angles.cos(), angles.sin()], 1) * scale).to(device), True)


def text(device: str, dtype: torch.dtype = torch.float32, key_start: int = 0) -> dict[str, Any]:
    """A call on all queries of a text; rows of tokens that take no part are NaN."""
    queries = 2 * torch.randn(LENGTH, NUM_HEADS * GROUP, HEAD_DIM)
    keys = 2 * torch.randn(LENGTH, NUM_HEADS, HEAD_DIM)
    slots = torch.randperm(LENGTH) + 1
    buffer = torch.full((LENGTH + 1, NUM_HEADS, HEAD_DIM), torch.nan)
    buffer[slots[key_start:]] = rotary("cpu").apply(keys, torch.arange(LENGTH))[key_start:]
    return {
        "queries": rotary("cpu").apply(queries, torch.arange(LENGTH)).to(device, dtype),
        "k_buffer": buffer.to(device, dtype),
        "token_slots": slots[key_start:].to(device),
        "sm_scale": 0.3,
        "key_start": key_start,
        "query_start": 0,
        "rotary": rotary(device),
        **SMALL,
    }


def part_of(call: dict[str, Any], begin: int, end: int) -> dict[str, Any]:
    """The same call on the queries ``[begin, end)``, which see no later key."""
    return {
        **call,
        "queries": call["queries"][begin:end].contiguous(),
        "token_slots": call["token_slots"][: end - call["key_start"]],
        "query_start": begin,
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("key_start", [0, 5, 19])
def test_is_what_a_copy_behind_the_text_attends_to(device: str, dtype: torch.dtype, key_start: int) -> None:
    call = part_of(text(device, dtype, key_start), key_start, LENGTH)
    torch.testing.assert_close(echo_attention(**call), echo_attention_reference(**call), rtol=1e-4, atol=1e-5)


def test_keys_in_float8_count_as_what_they_stand_for(device: str) -> None:
    call = text(device)
    stored = (4 * call["k_buffer"]).to(torch.float8_e4m3fn)
    meant = {**call, "k_buffer": stored.float() / 4}
    got = echo_attention(**{**call, "k_buffer": stored, "k_scale": 0.25})
    assert torch.equal(got, echo_attention(**meant))


def test_a_scaled_table_turns_without_scaling(device: str) -> None:
    call = text(device)
    scaled = {**call, "rotary": rotary(device, 1.2)}
    torch.testing.assert_close(echo_attention(**scaled), echo_attention(**call))


def test_chunks_at_block_ends_change_nothing(device: str) -> None:
    """A chunk sees no later keys, so only chunks that end with a block give the same."""
    call = text(device)
    whole = echo_attention(**call)
    combined = torch.zeros_like(whole)
    for begin, end in ((0, 16), (16, 40), (40, LENGTH)):
        part = echo_attention(**part_of(call, begin, end))
        combined[:, :end] = torch.maximum(combined[:, :end], part)
    assert torch.equal(combined, whole)


def test_keys_that_no_query_looks_at_score_zero(device: str) -> None:
    late = echo_attention(**part_of(text(device), 40, LENGTH))
    assert bool((late[:, 2:32] == 0).all()) and bool((late[:, 32:] > 0).all()) and bool((late[:, :2] > 0).all())


def test_no_query_looks_at_nothing(device: str) -> None:
    call = text(device)
    assert not echo_attention(**{**call, "queries": call["queries"][:0]}).any()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("queries", torch.zeros(4, 5, HEAD_DIM), "queries: expected a multiple of 2 KV heads, got 5 heads"),
        ("queries", torch.zeros(4, 6, 7), r"k_buffer: expected shape \[any, any, 7\]"),
        ("token_slots", torch.zeros(3, dtype=torch.int32), "token_slots: expected dtype int64, got int32"),
        ("token_slots", torch.tensor([0, 51]), r"token_slots: expected indices in \[0, 51\), got 0 to 51"),
        ("sm_scale", 0.0, "sm_scale: expected a finite number > 0, got 0.0"),
        ("query_start", -1, "query_start: expected an int >= 0, got -1"),
        ("key_start", 1.5, "key_start: expected an int >= 0, got 1.5"),
        ("block", 0, "block: expected an int >= 1, got 0"),
        ("num_blocks", 0, "num_blocks: expected an int >= 1, got 0"),
        ("num_sinks", -1, "num_sinks: expected an int >= 0, got -1"),
    ],
)
def test_bad_arguments_are_named(name: str, value: Tensor | float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        echo_attention(**{**text("cpu"), name: value})
