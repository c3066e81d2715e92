"""One prefix that several clients read without a pause: what is gained because it is compressed.

The prefix is cached, each client asks the next question as soon as it has its answer, and tokens are counted for some
seconds.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass

from serving_bench.clients import Load, figures, run_clients
from serving_bench.fleet import Fleet, compared_systems, flush_all
from serving_bench.options import Recorder, measure_points, parse_options
from serving_bench.page import Page, Table
from serving_bench.streams import stream_all
from serving_bench.texts import document, question

from kvevict_tools.launcher import System
from kvevict_tools.measure import in_turn

POOL_SLOTS = 12_000
RAMP_S = 0.6
STEADY_S = 2.0
ANSWER_TOKENS = 96
FULL = "budget 1"


@dataclass(frozen=True)
class Point:
    """Clients at a time, and the tokens of the prefix that they share."""

    clients: int
    prefix: int

    @property
    def name(self) -> str:
        """As shown in tables."""
        return f"prefix {self.prefix}, {self.clients} clients, long answers"

    @property
    def document(self) -> int:
        """A number for its text: points share nothing."""
        return 100 * self.clients + self.prefix // 1000


POINTS = (Point(4, 3000), Point(4, 6000), Point(16, 6000))
QUICK = POINTS[:1]

PAGE = Page(
    name="hot",
    command="python benchmarks/serving/bench_hot.py",
    summary=(
        "Clients that ask one question after the other on one prefix, without a pause; answers of "
        f"{ANSWER_TOKENS} tokens, a pool of {POOL_SLOTS:,} token slots; {STEADY_S:g} s, the prefix long cached. "
        f"`{FULL}` is the same attention backend without compression."
    ),
    tables=(
        Table("decode_tokens_per_s", "Decode, tokens/s of all clients", digits=1),
        Table("inter_token_ms", "Between two tokens of one answer, median ms", digits=1),
        Table("inter_token_p99_ms", "Between two tokens of one answer, 99 % ms", digits=1),
        Table("ttft_s", "First token, prefix cached, median s"),
    ),
    baseline=FULL,
)


def main() -> None:
    """Run the benchmark."""
    options = parse_options(__doc__ or "")
    measure_points(PAGE, options, QUICK if options.quick else POINTS, steady_systems(options.beside), measure)


def steady_systems(beside: tuple[str, ...]) -> list[System]:
    """Ours without compression and by default."""
    return [s for s in compared_systems(POOL_SLOTS, budgets=(1.0,), beside=beside) if s.name != "stock"]


def measure(fleet: Fleet, point: Point, recorder: Recorder) -> None:
    """One steady load on all servers in turn."""
    model, numbers = recorder.options.model, itertools.count(1, 1_000_000)
    prefix = document(model, point.document, point.prefix)
    load = Load(prefix, point.clients, ANSWER_TOKENS, lambda number: question(model, number))
    flush_all(fleet)
    for server in fleet.values():
        stream_all(server.url, [load.prefix], 1)  # it sees the prefix once
        stream_all(server.url, [[*load.prefix, *load.question(0)]], 1)

    def one(name: str, repetition: int) -> None:
        begin = time.perf_counter()
        streams = run_clients(fleet[name].url, load, next(numbers), RAMP_S + STEADY_S)
        found = figures(streams, begin + RAMP_S, begin + RAMP_S + STEADY_S)
        recorder.add(point.name, name, repetition, found)

    in_turn(fleet, recorder.options.repeats, one)


if __name__ == "__main__":
    main()
