"""Chats of 8 turns by 16 users who take turns, beside a pool that holds all histories, or not.

A repetition is one round: every user says the next thing. Stock and ours take turns round by round; the first round,
which finds nothing in the cache, is not counted.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence

import aiohttp
from serving_bench.fleet import COMMON_FLAGS, Fleet, compared_systems, flush_all, running
from serving_bench.options import LOGS, Recorder, parse_options
from serving_bench.page import HIT_RATE, REQUESTS, Page, Table
from serving_bench.streams import Stream, stream
from serving_bench.texts import document

from kvevict_tools.launcher import System, kvevict_system
from kvevict_tools.measure import alone

POOL_SLOTS = 2944
USERS = 16
FIRST_TOKENS = 512
TURNS = 8
TURN_TOKENS = 28
OUTPUT_TOKENS = 4
CONCURRENCY = 2
POINT = "4x the pool"
MIN_PREFIX_TOKENS = 64
OFTEN = f"min_prefix_tokens {MIN_PREFIX_TOKENS}"
"""Beside the default: what a chat has grown by is compressed from so many tokens on."""


PAGE = Page(
    name="multi-turn",
    command="python benchmarks/serving/bench_multi_turn.py",
    summary=(
        f"Chats of {TURNS} turns: {FIRST_TOKENS} tokens to begin with, {TURN_TOKENS} more and {OUTPUT_TOKENS} answered "
        f"in each turn; {USERS} users speak one after the other, {CONCURRENCY} requests at a time, a pool of "
        f"{POOL_SLOTS:,} token slots. The spread is over the rounds 2 to {TURNS}."
    ),
    tables=(REQUESTS, Table("ttft_s", "First token, median s"), HIT_RATE),
)


def main() -> None:
    """Run the benchmark; ``--repeats`` is the number of rounds."""
    options = parse_options(__doc__ or "", repeats=TURNS - 1)
    recorder = Recorder(PAGE, options, [POINT])
    with running(systems_of(options.beside), options.model, LOGS / PAGE.name, recorder.progress) as fleet:
        measure(fleet, recorder)
    recorder.close()


def systems_of(beside: Sequence[str]) -> list[System]:
    """Stock, the default, and ours where a chat need not grow by as much before it is compressed."""
    flags = ("--max-total-tokens", str(POOL_SLOTS), *COMMON_FLAGS)
    often = {"min_prefix_tokens": MIN_PREFIX_TOKENS}
    return [*compared_systems(POOL_SLOTS, beside=beside), kvevict_system(OFTEN, often, flags)]


def measure(fleet: Fleet, recorder: Recorder) -> None:
    """All rounds on all servers."""
    model = recorder.options.model
    flush_all(fleet)
    texts = [document(model, user + 1, FIRST_TOKENS + TURNS * TURN_TOKENS) for user in range(USERS)]
    histories = {name: [text[:FIRST_TOKENS] for text in texts] for name in fleet}
    for turn in range(recorder.options.repeats + 1):
        begin = FIRST_TOKENS + turn * TURN_TOKENS
        for name in list(fleet) if turn % 2 else list(reversed(fleet)):
            history = histories[name]
            for user, text in enumerate(texts):
                history[user] = history[user] + text[begin : begin + TURN_TOKENS]
            with alone(fleet[name], fleet.values()):
                started = time.perf_counter()
                streams = asyncio.run(round_of(fleet[name].url, history))
                seconds = time.perf_counter() - started
            for user, one in enumerate(streams):
                history[user] = history[user] + list(one.output_ids)
            if turn:
                recorder.add(POINT, name, turn, figures(streams, seconds))


async def round_of(url: str, prompts: Sequence[Sequence[int]]) -> list[Stream]:
    """One request for each user, in order, a few at a time."""
    gate = asyncio.Semaphore(CONCURRENCY)
    timeout = aiohttp.ClientTimeout(total=900)
    async with aiohttp.ClientSession(timeout=timeout, read_bufsize=2**20) as session:

        async def one(prompt: Sequence[int]) -> Stream:
            async with gate:
                return await stream(session, url, prompt, OUTPUT_TOKENS)

        return await asyncio.gather(*(one(prompt) for prompt in prompts))


def figures(streams: Sequence[Stream], seconds: float) -> dict[str, float]:
    """What a round showed."""
    return {
        "requests_per_s": len(streams) / seconds,
        "ttft_s": statistics.median(s.ttft_s for s in streams),
        "hit_rate_pct": 100 * sum(s.cached_tokens for s in streams) / sum(s.prompt_tokens for s in streams),
    }


if __name__ == "__main__":
    main()
