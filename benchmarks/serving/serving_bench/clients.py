"""Clients without a pause: as soon as an answer is there, each asks the next question on the same prefix."""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import aiohttp

from serving_bench.streams import Stream, stream

STAGGER_S = 0.05
"""Clients come one after the other: together they would stay in step, and all prefills would be one."""


@dataclass(frozen=True)
class Load:
    """Clients on one prefix.

    Attributes:
        prefix: token ids.
        num_clients: how many.
        answer_tokens: of each answer.
        question: token ids of the question of a number.
    """

    prefix: Sequence[int]
    num_clients: int
    answer_tokens: int
    question: Callable[[int], Sequence[int]]


def run_clients(url: str, load: Load, first_number: int, seconds: float) -> list[Stream]:
    """All answers that began within a time.

    Args:
        url: of the server.
        load: who asks what.
        first_number: of the first question; no two questions of a run may be the same.
        seconds: until clients ask no more; the last answers are waited for.
    """
    found: list[Stream] = []
    end = time.perf_counter() + seconds

    async def client(session: aiohttp.ClientSession, index: int) -> None:
        number = first_number + index
        await asyncio.sleep(index * STAGGER_S)
        while time.perf_counter() < end:
            prompt = [*load.prefix, *load.question(number)]
            found.append(await stream(session, url, prompt, load.answer_tokens))
            number += load.num_clients

    async def run() -> None:
        timeout = aiohttp.ClientTimeout(total=900)
        async with aiohttp.ClientSession(timeout=timeout, read_bufsize=2**20) as session:
            await asyncio.gather(*(client(session, index) for index in range(load.num_clients)))

    asyncio.run(run())
    return found


def figures(streams: Sequence[Stream], begin: float, end: float) -> dict[str, float]:
    """What clients got between two moments (seconds on the clock of ``time.perf_counter``).

    Returns tokens of all clients per second (first tokens, which a prefill makes, left out), median and 99 % of the
    milliseconds between two tokens of an answer, median seconds until the first.
    """
    gaps = [
        later[0] - earlier[0]
        for one in streams
        for earlier, later in zip(one.arrivals, one.arrivals[1:], strict=False)
        if later[1] == earlier[1] + 1 and begin <= earlier[0] and later[0] <= end
    ]
    tokens = sum(
        later[1] - earlier[1]
        for one in streams
        for earlier, later in zip(one.arrivals, one.arrivals[1:], strict=False)
        if begin <= later[0] <= end
    )
    firsts = [one.ttft_s for one in streams if begin <= one.arrivals[0][0] <= end]
    found = {"decode_tokens_per_s": tokens / (end - begin)}
    if gaps:
        found |= {"inter_token_ms": 1e3 * statistics.median(gaps), "inter_token_p99_ms": 1e3 * percentile(gaps, 0.99)}
    return found | ({"ttft_s": statistics.median(firsts)} if firsts else {})


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)), 1) - 1]
