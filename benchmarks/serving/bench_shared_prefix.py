"""Shared prefixes beside a pool that holds all of them, or not: SGLang's own client and generator.

The working set (prefixes x tokens) is a multiple of the KV pool. Every system is shown each prefix once; then each
repetition sends new questions on prefixes drawn at random. Stock and ours take turns.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from serving_bench.fleet import Fleet, compared_systems, flush_all
from serving_bench.options import Options, Recorder, measure_points, parse_options
from serving_bench.page import FIRST_TOKEN, HIT_RATE, REQUESTS, Page, Table
from serving_bench.sglang_client import Workload, held_slots, run_client

from kvevict_tools.measure import in_turn

POOL_SLOTS = 8192
QUESTION_TOKENS = 32
OUTPUT_TOKENS = 8
PREFIX_TOKENS = 1024
CONCURRENCY = 2
STOCK = "stock"


@dataclass(frozen=True)
class Point:
    """A working set.

    Attributes:
        name: as shown in tables.
        num_prefixes: prefixes of :data:`PREFIX_TOKENS` each.
        requests: requests of one repetition.
    """

    name: str
    num_prefixes: int
    requests: int = 12


POINTS = tuple(Point(f"{times}x the pool", int(8 * times)) for times in (0.5, 4, 8, 16, 32, 64))
QUICK = (Point("4x the pool", 32, requests=8),)

PAGE = Page(
    name="shared-prefix",
    command="python benchmarks/serving/bench_shared_prefix.py",
    summary=(
        f"SGLang's `bench_serving` client, requests of its `generated-shared-prefix` generator: prefixes of 1,024 "
        f"random tokens, questions of {QUESTION_TOKENS}, {OUTPUT_TOKENS} generated tokens, {CONCURRENCY} requests at a "
        f"time, a pool of {POOL_SLOTS:,} token slots. Each prefix was sent once before, one at a time (to stock "
        "the last ones alone, twice what its pool holds: it has dropped all others by then); questions are always new."
    ),
    tables=(
        REQUESTS,
        FIRST_TOKEN,
        Table("inter_token_ms", "Between two tokens, median ms", digits=0),
        HIT_RATE,
        Table("held_slots", "Token slots held when idle", has_ratio=False, digits=0),
    ),
)


def main() -> None:
    """Run the benchmark."""
    options = parse_options(__doc__ or "")
    points = QUICK if options.quick else POINTS
    fits = any(name.startswith("0.5x") for name in options.chosen([point.name for point in points]))
    systems = compared_systems(POOL_SLOTS, budgets=(1.0,) if fits else (), has_none=fits, beside=options.beside)
    measure_points(PAGE, options, points, systems, measure)


def requests_of(point: Point, options: Options) -> tuple[list[Any], list[list[Any]]]:
    """One request per prefix to begin with, and the requests of each repetition: other questions, random prefixes."""
    rounds = options.repeats + 1
    per_group = 1 + options.repeats * max(1, -(-point.requests // point.num_prefixes))
    per_group = max(per_group, rounds)
    rows = Workload(point.num_prefixes, per_group, PREFIX_TOKENS, QUESTION_TOKENS, OUTPUT_TOKENS).rows(options.model)
    groups = [rows[i * per_group : (i + 1) * per_group] for i in range(point.num_prefixes)]
    first = [group.pop() for group in groups]
    chooser = random.Random(7)
    draws = []
    for _ in range(options.repeats):
        order: list[int] = []
        while len(order) < point.requests:
            order += chooser.sample(range(point.num_prefixes), point.num_prefixes)
        draws.append([groups[i].pop() for i in order[: point.requests]])
    return first, draws


def measure(fleet: Fleet, point: Point, recorder: Recorder) -> None:
    """One working set on all servers."""
    options = recorder.options
    first, draws = requests_of(point, options)
    flush_all(fleet)
    for name, server in fleet.items():
        shown = first[-max(2 * POOL_SLOTS // PREFIX_TOKENS, 1) :] if name == STOCK else first
        recorder.progress(f"{point.name}: showing {len(shown)} prefixes to {name}")
        run_client(server.url, options.model, shown, max_concurrency=1)

    def one(name: str, repetition: int) -> None:
        server = fleet[name]
        figures = run_client(server.url, options.model, draws[repetition - 1], CONCURRENCY)
        recorder.add(point.name, name, repetition, figures | {"held_slots": held_slots(server)})

    in_turn(fleet, options.repeats, one)


if __name__ == "__main__":
    main()
