"""Prefill of prompts that nothing is cached of, with compression and without; stock and ours in turn."""

from __future__ import annotations

import time
from dataclasses import dataclass

from serving_bench.fleet import Fleet, compared_systems
from serving_bench.options import Recorder, measure_points, parse_options
from serving_bench.page import Page, Table
from serving_bench.streams import stream_all
from serving_bench.texts import document

from kvevict_tools.measure import flush, in_turn, plugin_state

POOL_SLOTS = 10_000


@dataclass(frozen=True)
class Point:
    """Prompts of one length, sent one after the other."""

    tokens: int
    count: int

    @property
    def name(self) -> str:
        """As shown in tables."""
        return f"{self.count} prompts of {self.tokens}"


POINTS = (Point(1024, 3), Point(3000, 2), Point(8000, 1))
QUICK = (Point(1024, 2),)

PAGE = Page(
    name="prefill",
    command="python benchmarks/serving/bench_prefill.py",
    summary=(
        "Prompts that share nothing, one after the other, one token generated for each: prefill, insertion and, with a "
        "budget, compression."
    ),
    tables=(
        Table("prompt_tokens_per_s", "Prompt tokens/s", digits=0),
        Table("compression_ms", "Compression, ms per prompt", has_ratio=False, digits=0),
    ),
)


def main() -> None:
    """Run the benchmark."""
    options = parse_options(__doc__ or "")
    is_full = not options.quick
    budgets = (1.0,) if is_full else ()
    systems = compared_systems(POOL_SLOTS, budgets=budgets, has_none=is_full, beside=options.beside)
    measure_points(PAGE, options, QUICK if options.quick else POINTS, systems, measure)


def measure(fleet: Fleet, point: Point, recorder: Recorder) -> None:
    """One prompt length on all servers; an uncounted prompt warms up each of them."""
    model = recorder.options.model
    for server in fleet.values():
        flush(server)
        stream_all(server.url, [document(model, 99, point.tokens)], 1)

    def one(name: str, repetition: int) -> None:
        server = fleet[name]
        flush(server)
        prompts = [document(model, repetition * 10 + i, point.tokens) for i in range(point.count)]
        before = plugin_state(server)
        begin = time.perf_counter()
        for prompt in prompts:
            stream_all(server.url, [prompt], 1)
        found = {"prompt_tokens_per_s": point.tokens * point.count / (time.perf_counter() - begin)}
        after = plugin_state(server)
        if before and after and "compression_seconds" in after:
            spent = after["compression_seconds"] - before["compression_seconds"]
            found["compression_ms"] = 1e3 * spent / point.count
        recorder.add(point.name, name, repetition, found)

    in_turn(fleet, recorder.options.repeats, one)


if __name__ == "__main__":
    main()
