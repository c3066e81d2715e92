"""Chats of 8 turns by 16 users who take turns, beside a pool that holds all histories, or not.

A repetition is one round: every user says the next thing. Stock and ours take turns round by round; the first round,
which finds nothing in the cache, is not counted.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

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
TURNS = 8
TURN_TOKENS = 28
OUTPUT_TOKENS = 4
CONCURRENCY = 2
MIN_PREFIX_TOKENS = 64
OFTEN = f"min_prefix_tokens {MIN_PREFIX_TOKENS}"
"""Beside the default: what a chat has grown by is compressed from so many tokens on."""


@dataclass(frozen=True)
class Point:
    """Users and what each of them begins with."""

    name: str
    users: int
    first_tokens: int


POINTS = (Point("0.5x the pool", 2, 512), Point("4x the pool", USERS, 512))
QUICK = (Point("4x the pool", USERS, 512),)

PAGE = Page(
    name="multi-turn",
    command="python benchmarks/serving/bench_multi_turn.py",
    summary=(
        f"Chats of {TURNS} turns: 512 tokens to begin with, {TURN_TOKENS} more and {OUTPUT_TOKENS} answered in each "
        f"turn; 16 users (2 at 0.5x) speak one after the other, {CONCURRENCY} requests at a time, a pool of "
        f"{POOL_SLOTS:,} token slots. The spread is over the rounds 2 to {TURNS}."
    ),
    tables=(
        REQUESTS,
        Table("ttft_s", "First token, median s"),
        HIT_RATE,
    ),
)


def main() -> None:
    """Run the benchmark; ``--repeats`` is the number of rounds."""
    options = parse_options(__doc__ or "", repeats=TURNS - 1)
    points = {point.name: point for point in (QUICK if options.quick else POINTS)}
    recorder = Recorder(PAGE, options, list(points))
    with running(systems_of(options.beside), options.model, LOGS / PAGE.name, recorder.progress) as fleet:
        for name in options.chosen(list(points)):
            measure(fleet, points[name], recorder)
    recorder.close()


def systems_of(beside: Sequence[str]) -> list[System]:
    """Stock, the default, and ours where a chat need not grow by as much before it is compressed."""
    flags = ("--max-total-tokens", str(POOL_SLOTS), *COMMON_FLAGS)
    often = {"min_prefix_tokens": MIN_PREFIX_TOKENS}
    return [*compared_systems(POOL_SLOTS, beside=beside), kvevict_system(OFTEN, often, flags)]


def measure(fleet: Fleet, point: Point, recorder: Recorder) -> None:
    """All rounds on all servers."""
    model = recorder.options.model
    flush_all(fleet)
    texts = [document(model, user + 1, point.first_tokens + TURNS * TURN_TOKENS) for user in range(point.users)]
    histories = {name: [text[: point.first_tokens] for text in texts] for name in fleet}
    for turn in range(recorder.options.repeats + 1):
        begin = point.first_tokens + turn * TURN_TOKENS
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
                recorder.add(point.name, name, turn, figures(streams, seconds))


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
