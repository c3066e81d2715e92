"""One prefix that several clients read without a pause: what is gained once it is compressed, and how soon it is.

Steady state: the prefix is cached, each client asks the next question as soon as it has its answer, and tokens are
counted for some seconds. Passes: the same clients from the moment on at which the prefix becomes due, on a server that
does not limit passes, until the prefix is compressed. What passes cost by default: ``bench_hits.py``.
"""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serving_bench.clients import Load, figures, run_clients, tokens_between
from serving_bench.fleet import COMMON_FLAGS, Fleet, compared_systems, flush_all, running
from serving_bench.options import LOGS, Recorder, parse_options
from serving_bench.page import Page, Table
from serving_bench.streams import Stream, stream_all
from serving_bench.texts import document, question
from serving_bench.watch import watching

from kvevict_tools.launcher import RunningServer, System, free_port, kvevict_system
from kvevict_tools.measure import flush, in_turn, wait_until_scored
from sgl_kvevict.events.types import Compressed, ScoringPass

POOL_SLOTS = 12_000
RAMP_S = 0.6
STEADY_S = 2.0
LIMIT_S = 120.0
"""Until clients leave in any case."""
ANSWERS = {"short": 12, "long": 96}
FULL = "budget 1"
UNLIMITED = "pass_share 1"


@dataclass(frozen=True)
class Point:
    """Clients, the prefix they share, and how long its answers are.

    Attributes:
        clients: at a time.
        prefix: tokens.
        answers: a name of ``ANSWERS``.
        has_passes: what happens before the prefix is compressed is measured, not what happens afterwards.
    """

    clients: int
    prefix: int
    answers: str
    has_passes: bool = False

    @property
    def name(self) -> str:
        """As shown in tables."""
        passes = ", passes" if self.has_passes else ""
        return f"prefix {self.prefix}, {self.clients} clients{passes}, {self.answers} answers"

    @property
    def document(self) -> int:
        """A number for its text: points share nothing."""
        return 100 * self.clients + self.prefix // 1000 + 50 * self.has_passes + 25 * (self.answers == "long")


POINTS = (
    *(Point(*sizes) for sizes in itertools.product((1, 4, 16), (3000, 6000), ANSWERS)),
    Point(4, 3000, "long", has_passes=True),
)
QUICK = (Point(4, 3000, "long"), Point(4, 3000, "long", has_passes=True))

PAGE = Page(
    name="hot",
    command="python benchmarks/serving/bench_hot.py",
    summary=(
        f"Clients that ask one question after the other on one prefix, without a pause; answers of {ANSWERS['short']} "
        f"or {ANSWERS['long']} tokens, a pool of {POOL_SLOTS:,} token slots. Steady state: {STEADY_S:g} s, the prefix "
        f"long cached, `{FULL}` is the same attention backend without compression. Point with passes: `{UNLIMITED}` "
        "lets passes follow each other while the prefix is read, until it is compressed. "
        "Steps to compressed: decode steps from the end of the last pass on."
    ),
    tables=(
        Table("decode_tokens_per_s", "Decode, tokens/s of all clients", digits=1),
        Table("inter_token_ms", "Between two tokens of one answer, median ms", digits=1),
        Table("inter_token_p99_ms", "Between two tokens of one answer, 99 % ms", digits=1),
        Table("ttft_s", "First token, prefix cached, median s"),
        Table("passes", "Passes while clients asked", has_ratio=False, digits=0),
        Table("seconds_to_compressed", "From the first question to compressed, s", has_ratio=False, digits=1),
        Table("steps_to_compressed", "Steps from the last pass to compressed", has_ratio=False, digits=0),
    ),
    baseline=FULL,
)


@dataclass
class Bench:
    """Servers and where the events of the one with passes come from."""

    fleet: Fleet
    recorder: Recorder
    endpoint: str
    numbers: Any = field(default_factory=lambda: itertools.count(1, 1_000_000))

    @property
    def model(self) -> Path:
        """Its folder."""
        return self.recorder.options.model


def main() -> None:
    """Run the benchmark."""
    options = parse_options(__doc__ or "")
    points = {point.name: point for point in (QUICK if options.quick else POINTS)}
    chosen = [points[name] for name in options.chosen(list(points))]
    recorder = Recorder(PAGE, options, list(points))
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    for has_passes in (False, True):
        part = [point for point in chosen if point.has_passes is has_passes]
        systems = [system_with_passes(endpoint)] if has_passes else steady_systems(options.beside)
        if part:
            with running(systems, options.model, LOGS / PAGE.name, recorder.progress) as fleet:
                bench = Bench(fleet, recorder, endpoint)
                for point in part:
                    (measure_passes if has_passes else measure_steady)(bench, point)
    recorder.close()


def steady_systems(beside: tuple[str, ...]) -> list[System]:
    """Ours without compression and by default."""
    return [s for s in compared_systems(POOL_SLOTS, budgets=(1.0,), beside=beside) if s.name != "stock"]


def system_with_passes(endpoint: str) -> System:
    """Ours with passes without limit, whose events are published."""
    flags = ("--max-total-tokens", str(POOL_SLOTS), *COMMON_FLAGS)
    return kvevict_system(UNLIMITED, {"pass_share": 1.0, "events": {"endpoint": endpoint}}, flags)


def load_of(point: Point, model: Path, repetition: int = 0) -> Load:
    """What clients ask."""
    prefix = document(model, point.document + 10_000 * repetition, point.prefix)
    return Load(prefix, point.clients, ANSWERS[point.answers], lambda number: question(model, number))


def cache_prefix(server: RunningServer, load: Load) -> None:
    """Let a server see the prefix once."""
    stream_all(server.url, [load.prefix], 1)


def measure_steady(bench: Bench, point: Point) -> None:
    """One steady load on all servers in turn."""
    load = load_of(point, bench.model)
    flush_all(bench.fleet)
    for server in bench.fleet.values():
        cache_prefix(server, load)
        stream_all(server.url, [[*load.prefix, *load.question(0)]], 1)
        wait_until_scored(server)

    def one(name: str, repetition: int) -> None:
        begin = time.perf_counter()
        streams = run_clients(bench.fleet[name].url, load, next(bench.numbers), RAMP_S + STEADY_S)
        found = figures(streams, begin + RAMP_S, begin + RAMP_S + STEADY_S)
        bench.recorder.add(point.name, name, repetition, found)

    in_turn(bench.fleet, bench.recorder.options.repeats, one)


def measure_passes(bench: Bench, point: Point) -> None:
    """From the moment at which a prefix is due, in each repetition another prefix."""

    def one(name: str, repetition: int) -> None:
        server = bench.fleet[name]
        load = load_of(point, bench.model, repetition)
        flush(server)
        cache_prefix(server, load)
        bench.recorder.add(point.name, name, repetition, with_passes(bench, server, load))

    in_turn(bench.fleet, bench.recorder.options.repeats, one)


def with_passes(bench: Bench, server: RunningServer, load: Load) -> dict[str, float]:
    """What clients get while passes run, and how soon the prefix is compressed afterwards."""
    with watching(bench.endpoint) as watch:
        begin = time.perf_counter()
        ends: list[float] = []

        def is_over() -> bool:
            if watch.first(Compressed) is not None:
                ends.append(time.perf_counter())
            return bool(ends)

        streams = run_clients(server.url, load, next(bench.numbers), LIMIT_S, is_over)
        compressed = watch.first(Compressed)
        passes = [moment for moment, event in watch.events if isinstance(event, ScoringPass)]
    if not passes:
        raise RuntimeError(f"no pass ran within {LIMIT_S:g} s")
    end = min(compressed or math.inf, *ends, begin + LIMIT_S)
    found = figures(streams, begin, end) | {"passes": float(sum(moment <= end for moment in passes))}
    if compressed is None:
        return found
    last = max((moment for moment in passes if moment <= compressed), default=begin)
    return found | until_compressed(streams, begin, last, compressed)


def until_compressed(streams: list[Stream], begin: float, last_pass: float, compressed: float) -> dict[str, float]:
    """How long it took; nothing about steps if the clients had gone before."""
    found = {"seconds_to_compressed": compressed - begin}
    if compressed > max(one.arrivals[-1][0] for one in streams):
        return found
    return found | {"steps_to_compressed": float(tokens_between(streams, last_pass, compressed))}


if __name__ == "__main__":
    main()
