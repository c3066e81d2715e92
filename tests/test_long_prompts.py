"""What prompts longer than the pool hold, and how long they may be."""

from __future__ import annotations

import random

import pytest

from sgl_kvevict.config import KVEvictConfig
from sgl_kvevict.long_prompts import LongPrompts


def plan(num_slots: int = 1500, chunk: int | None = 256, **fields) -> LongPrompts | None:
    return LongPrompts.of(KVEvictConfig(**fields), num_slots, chunk)


def held(long: LongPrompts, num_tokens: int, rng: random.Random) -> int:
    """Most slots held while chunks of random sizes are computed, and everything before shrinks as far as it can."""
    config, most, segments, rest, done = long.config, 0, 0, 0, 0
    while done < num_tokens:
        chunk = min(rng.randint(1, long.chunk), num_tokens - done)
        if rest >= config.min_prefix_tokens:
            segments, rest = segments + config.num_slots(rest, share=config.shares[-1]), 0
        most = max(most, segments + rest + chunk)
        rest, done = rest + chunk, done + chunk
    return most


@pytest.mark.parametrize("chunk", [64, 256, 1000])
def test_the_peak_is_a_bound(chunk):
    long = plan(chunk=chunk)
    rng = random.Random(chunk)
    for _ in range(200):
        num_tokens = rng.randint(1, 12_000)
        assert held(long, num_tokens, rng) <= long.slots_at_peak(num_tokens) <= num_tokens


def test_the_longest_prompt_is_the_last_that_fits():
    long = plan()
    longest = long.longest(40)
    assert longest > 6 * 1500 and long.slots_at_peak(longest) <= 1500 - 42 < long.slots_at_peak(longest + 1)


def test_the_share_that_a_whole_prompt_can_afford():
    share, rest = plan().affordable_share(4000, 40), 4000 - 256 - 256
    assert 0.2 < share < 0.3 and 512 + share * rest + rest // 256 <= 1500 - 42
    assert plan().affordable_share(20_000, 40) < 0.1


def test_a_large_chunk_is_made_smaller():
    assert plan(num_slots=8000, chunk=8192).chunk == 1000
    assert plan(num_slots=1500, chunk=8192).chunk == 256  # min_prefix_tokens


@pytest.mark.parametrize(
    "fields",
    [
        {"policy": "none"},
        {"policy": "snapkv"},
        {"budget": 1.0},
        {"chunk": None},  # SGLang's limit: prompts are not prefilled in chunks
        {"num_slots": 280},  # too few to prefill anything and keep anything
    ],
)
def test_nothing_longer_than_the_pool_where_chunks_cannot_shrink(fields):
    assert plan(**fields) is None
