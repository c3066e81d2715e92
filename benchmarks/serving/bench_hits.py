"""How long clients wait for an answer from the cache while scoring passes are on, to the same with passes off.

Clients that send one request at a time: without a pause, with pauses, a growing chat, several at once. Every
repetition has prompts of its own; the request that computes a prefix is not counted, all that find it are.
Two servers take turns, the other one is suspended.
"""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
from serving_bench.fleet import COMMON_FLAGS, Fleet, flush_all, running
from serving_bench.options import LOGS, Recorder, parse_options
from serving_bench.page import Page, Table
from serving_bench.streams import Stream, stream
from serving_bench.texts import document, question

from kvevict_tools.launcher import System, kvevict_system
from kvevict_tools.measure import in_turn, plugin_state

POOL_SLOTS = 24_000
"""More than all prompts together: nothing is dropped, or shrinks for others."""
PREFIX_TOKENS = 400
FIRST_TOKENS, TURN_TOKENS, TURNS = 300, 140, 8
"""Of a growing chat."""
ANSWER_TOKENS = 12
PASSES, NO_PASSES = "passes", "no passes"


@dataclass(frozen=True)
class Point:
    """What clients do.

    Attributes:
        pause_s: seconds between an answer and the same client's next request.
        hits: requests of each client that find what they begin with.
        chat: each request is the one before, its answer, and a new turn; else all clients' begin with one prefix.
    """

    name: str
    clients: int = 1
    pause_s: float = 0.0
    hits: int = 12
    chat: bool = False


POINTS = (
    Point("1 client, no pause"),
    Point("1 client, pauses of 0.3 s", pause_s=0.3),
    Point(f"a chat of {TURNS} turns", pause_s=0.3, hits=TURNS - 1, chat=True),
    Point("4 clients, no pause", clients=4, hits=5),
)
QUICK = tuple(replace(point, hits=3) for point in POINTS)

PAGE = Page(
    name="hits",
    command="python benchmarks/serving/bench_hits.py",
    summary=(
        f"Seconds from a request to its whole answer of {ANSWER_TOKENS} tokens, of requests that find a prefix of "
        f"{PREFIX_TOKENS} tokens in the cache (a chat: {FIRST_TOKENS} tokens, then {TURN_TOKENS} more a turn, and "
        "pauses of 0.3 s), a pool of "
        f"{POOL_SLOTS:,} token slots. `{NO_PASSES}` is the default configuration, `{PASSES}` the same with "
        "`score_after_matches: 1`, measured in turn with other prompts in each repetition; `all` is the median and "
        "the 95 % of all repetitions' requests together."
    ),
    tables=(
        Table("hit_s", "A hit, median s", digits=3),
        Table("hit_p95_s", "A hit, 95 % s", digits=3),
        Table("found_pct", "Prompt tokens found in the cache, %", has_ratio=False, digits=0),
        Table("passes", "Scoring passes meanwhile", has_ratio=False, digits=0),
    ),
    baseline=NO_PASSES,
)


def main() -> None:
    """Run the benchmark."""
    options = parse_options(__doc__ or "")
    points = {point.name: point for point in (QUICK if options.quick else POINTS)}
    recorder = Recorder(PAGE, options, [row for name in points for row in (name, all_of(name))])
    with running(systems(), options.model, LOGS / PAGE.name, recorder.progress) as fleet:
        for number, (name, point) in enumerate(points.items()):
            if name in options.chosen(list(points)):
                flush_all(fleet)
                measure(fleet, point, recorder, 1000 * (number + 1))
    recorder.close()


def all_of(name: str) -> str:
    """The point of all repetitions' requests."""
    return f"{name}, all"


def systems() -> list[System]:
    """The default, and the same with passes."""
    flags = ("--max-total-tokens", str(POOL_SLOTS), *COMMON_FLAGS)
    return [kvevict_system(NO_PASSES, {}, flags), kvevict_system(PASSES, {"score_after_matches": 1}, flags)]


def measure(fleet: Fleet, point: Point, recorder: Recorder, first: int) -> None:
    """One point on both servers; ``first`` is the number of its first document."""
    hits: dict[str, list[Stream]] = {name: [] for name in fleet}

    def one(name: str, repetition: int) -> None:
        server = fleet[name]
        before = num_passes(plugin_state(server))
        found = asyncio.run(run(server.url, recorder.options.model, point, first + 10 * repetition))
        passes = {"passes": float(num_passes(plugin_state(server)) - before)}
        hits[name] += found
        recorder.add(point.name, name, repetition, figures(found) | passes)

    in_turn(fleet, recorder.options.repeats, one)
    for name, found in hits.items():
        recorder.add(all_of(point.name), name, 1, figures(found))


def num_passes(state: Mapping[str, int] | None) -> int:
    """Scoring passes of a server so far."""
    return 0 if state is None else int(state["scoring_passes"])


async def run(url: str, model: Path, point: Point, number: int) -> list[Stream]:
    """All clients of a point at once, on the document of a number; returns their hits."""
    timeout = aiohttp.ClientTimeout(total=900)
    async with aiohttp.ClientSession(timeout=timeout, read_bufsize=2**20) as session:
        if point.chat:
            return await chat(session, url, point, document(model, number, FIRST_TOKENS + TURNS * TURN_TOKENS))
        prefix = document(model, number, PREFIX_TOKENS)
        await stream(session, url, prefix, 1)

        async def client(first: int) -> list[Stream]:
            found = []
            for turn in range(point.hits):
                ask = [*prefix, *question(model, first + turn)]
                found.append(await stream(session, url, ask, ANSWER_TOKENS))
                await asyncio.sleep(point.pause_s)
            return found

        clients = (client(100 * number) for number in range(point.clients))
        return [hit for hits in await asyncio.gather(*clients) for hit in hits]


async def chat(session: aiohttp.ClientSession, url: str, point: Point, text: Sequence[int]) -> list[Stream]:
    """Turns of one chat, whose first one computes what it begins with."""
    prompt = list(text[:FIRST_TOKENS])
    found = []
    for turn in range(point.hits + 1):
        answer = await stream(session, url, prompt, ANSWER_TOKENS)
        found += [answer] if turn else []
        begin = FIRST_TOKENS + turn * TURN_TOKENS
        prompt = [*prompt, *answer.output_ids, *text[begin : begin + TURN_TOKENS]]
        await asyncio.sleep(point.pause_s)
    return found


def figures(hits: Sequence[Stream]) -> dict[str, float]:
    """What hits took."""
    seconds = sorted(hit.arrivals[-1][0] - hit.sent_s for hit in hits)
    return {
        "hit_s": statistics.median(seconds),
        "hit_p95_s": seconds[math.ceil(0.95 * len(seconds)) - 1],
        "found_pct": 100 * sum(hit.cached_tokens for hit in hits) / sum(hit.prompt_tokens for hit in hits),
    }


if __name__ == "__main__":
    main()
