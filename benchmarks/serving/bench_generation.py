"""Long answers: tokens/s and token slots held, while answers are compressed, or nothing is, beside stock.

Each request generates its answer from the start. `none` is our attention with nothing compressed; what the default
gains beyond it is compression's. The pool holds two of the answers, so eight requests of stock wait, or are retracted.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from serving_bench.fleet import Fleet, compared_systems, flush_all, running
from serving_bench.options import LOGS, Recorder, parse_options
from serving_bench.page import Page, Table
from serving_bench.streams import stream_all
from serving_bench.texts import document

from kvevict_tools.launcher import RunningServer
from kvevict_tools.measure import in_turn, parse_gauges

PROMPT_TOKENS = 512
LOOKS_S = 0.5
"""Between two looks at a server's gauges."""


@dataclass(frozen=True)
class Point:
    """Tokens of each answer, and requests at a time."""

    tokens: int
    requests: int

    @property
    def name(self) -> str:
        """As shown in tables."""
        return f"{self.tokens} generated, {self.requests} requests"


POINTS = tuple(Point(tokens, requests) for tokens in (512, 1024, 4096) for requests in (1, 8))
QUICK = (Point(512, 1), Point(512, 4))

PAGE = Page(
    name="generation",
    command="python benchmarks/serving/bench_generation.py",
    summary=(
        f"Answers to prompts of {PROMPT_TOKENS} tokens, generated from the start; the pool holds two of them. "
        "`none`: our attention backend with nothing compressed. Slots are the most that were not free, "
        "prompts included, as SGLang's gauges show it."
    ),
    tables=(
        Table("tokens_per_s", "Tokens/s of all requests, from the first request to the last answer", digits=1),
        Table("slots", "Token slots held at most", digits=0),
        Table("failed", "Requests that failed", has_ratio=False, digits=0),
    ),
)


def main() -> None:
    """Run the benchmark."""
    # One repetition of a point takes up to half an hour.
    options = parse_options(__doc__ or "", repeats=1)
    points = {point.name: point for point in (QUICK if options.quick else POINTS)}
    recorder = Recorder(PAGE, options, list(points))
    chosen = [points[name] for name in options.chosen(recorder.points)]
    for tokens in sorted({point.tokens for point in chosen}):
        systems = compared_systems(2 * (PROMPT_TOKENS + tokens), has_none=True, beside=options.beside)
        with running(systems, options.model, LOGS / PAGE.name, recorder.progress) as fleet:
            for point in (point for point in chosen if point.tokens == tokens):
                measure(fleet, point, recorder)
    recorder.close()


def measure(fleet: Fleet, point: Point, recorder: Recorder) -> None:
    """One point on all servers."""

    def one(name: str, repetition: int) -> None:
        model, number = recorder.options.model, 100 * repetition
        prompts = [document(model, number + i, PROMPT_TOKENS) for i in range(point.requests)]
        flush_all({name: fleet[name]})
        began = time.perf_counter()
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(stream_all, fleet[name].url, prompts, point.tokens)
            slots = most_slots(fleet[name], asked)
        lengths = [len(stream.output_ids) for stream in asked.result()]
        found = {"tokens_per_s": sum(lengths) / (time.perf_counter() - began), "slots": float(slots)}
        recorder.add(point.name, name, repetition, found | {"failed": float(sum(n < point.tokens for n in lengths))})

    in_turn(fleet, recorder.options.repeats, one)


def most_slots(server: RunningServer, asked: Future[Any]) -> int:
    """Most token slots that were not free until all answers are there."""
    most = 0
    while not asked.done():
        gauges = parse_gauges(server.get_text("/metrics"))
        most = max(most, gauges.total - gauges.available)
        time.sleep(LOOKS_S)
    return most


if __name__ == "__main__":
    main()
