"""Working sets that do not fit, from a cold start, with questions that have right answers: speed and worth in one row.

Contexts with needles in prose, asked about in random order, each once before any comes again. Every system begins with
an empty cache and is asked about each context; then stock and ours take turns round by round and are asked the same
questions. Last, a prefix is asked again after a burst of other documents, with ``retain`` and without.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from serving_bench.fleet import COMMON_FLAGS, DEFAULT, Fleet, compared_systems, flush_all, running
from serving_bench.needles import Answered, Context, Needles, figures, rounds
from serving_bench.options import LOGS, Recorder, parse_options
from serving_bench.page import HIT_RATE, REQUESTS, Page, Table
from serving_bench.texts import document

from kvevict_tools.launcher import kvevict_system
from kvevict_tools.measure import alone, flush, in_turn

POOL_SLOTS = 16_384
CONTEXT_TOKENS = 1024
CONCURRENCY = 2
LONGEST_ROUND = 32
BURST = "a prefix, after a burst of 4x the pool"
BURST_POOL, BURST_TOKENS, BURST_SHARE = 512, 200, 0.5
NUM_OTHERS = int(4 * BURST_POOL / BURST_SHARE) // BURST_TOKENS
"""Documents that take four times the pool, compressed to the share at which nothing shrinks further."""
RETAIN_S = 600


@dataclass(frozen=True)
class Point:
    """A working set, as a multiple of the pool.

    Attributes:
        multiple: of the pool.
    """

    multiple: int

    @property
    def name(self) -> str:
        """As shown in tables."""
        return f"{self.multiple}x the pool"

    @property
    def num_contexts(self) -> int:
        """So many contexts are the working set."""
        return self.multiple * POOL_SLOTS // CONTEXT_TOKENS


POINTS = (Point(4), Point(8), Point(16))
QUICK = (Point(2),)

PAGE = Page(
    name="pressure",
    command="python benchmarks/serving/bench_pressure.py",
    summary=(
        f"Contexts of {CONTEXT_TOKENS:,} tokens with needles, {CONCURRENCY} questions at a time, a pool of "
        f"{POOL_SLOTS:,} token slots; a round asks about {LONGEST_ROUND} contexts, each once before any comes again. "
        "`cold start` is one question about each context, into an empty cache, `all rounds` is everything from then "
        "on. The needle score is the share of the values asked for that the answers contain; stock's is the full "
        f"cache's. The burst: {NUM_OTHERS} documents of {BURST_TOKENS} tokens, a pool of {BURST_POOL:,}, `budget` and "
        f"`min_budget` {BURST_SHARE}, so that they take four times the pool, and no memory of the host; then a prefix "
        f"of as many tokens is asked again, which was asked once before, without options and with `retain` of "
        f"{RETAIN_S} seconds."
    ),
    tables=(
        REQUESTS,
        Table("needle_score", "Needle score"),
        HIT_RATE,
        Table("answer_s", "Whole answer, median s"),
    ),
)


def names_of(point: Point) -> list[str]:
    """Points of the page that a working set gives."""
    return [point.name, f"{point.name}, cold start", f"{point.name}, all rounds"]


def main() -> None:
    """Run the benchmark; ``--repeats`` is the number of rounds after the cold start."""
    options = parse_options(__doc__ or "")
    points = {point.name: point for point in (QUICK if options.quick else POINTS)}
    recorder = Recorder(PAGE, options, [*(name for point in points.values() for name in names_of(point)), BURST])
    chosen = options.chosen([*points, BURST])
    if BURST in chosen:
        measure_burst(recorder)
    if chosen != [BURST]:
        measure_points([point for name, point in points.items() if name in chosen], recorder)
    recorder.close()


def measure_burst(recorder: Recorder) -> None:
    """How much of a prefix is found after other documents; each repetition has a prefix and documents of its own."""
    model, flags = recorder.options.model, ("--max-total-tokens", str(BURST_POOL), *COMMON_FLAGS)
    config = {"host_bytes": 0, "budget": BURST_SHARE, "min_budget": BURST_SHARE}
    systems = [kvevict_system(DEFAULT, config, flags)]
    with running(systems, model, LOGS / PAGE.name / "burst", recorder.progress) as fleet:
        server = fleet[DEFAULT]

        def ask(tokens: list[int], **options: float) -> int:
            sampling = {"temperature": 0, "max_new_tokens": 1, "custom_params": {"kvevict": options}}
            answer = json.loads(server.post("/generate", {"input_ids": tokens, "sampling_params": sampling}))
            return int(answer["meta_info"]["cached_tokens"])

        for repetition in range(1, recorder.options.repeats + 1):
            prefix, *others = (
                document(model, repetition * 100 + number, BURST_TOKENS) for number in range(NUM_OTHERS + 1)
            )
            for name, options in {DEFAULT: {}, "retain": {"retain": RETAIN_S}}.items():
                flush(server)
                ask(prefix, **options)
                for other in others:
                    ask(other)
                found = ask([*prefix, *others[0][:1]])
                recorder.add(BURST, name, repetition, {"hit_rate_pct": 100 * found / (len(prefix) + 1)})


def measure_points(chosen: Sequence[Point], recorder: Recorder) -> None:
    """Working sets on all servers."""
    options, first = recorder.options, 0
    needles = Needles(options.model, CONTEXT_TOKENS)
    systems = compared_systems(POOL_SLOTS, beside=options.beside)
    with running(systems, options.model, LOGS / PAGE.name, recorder.progress) as fleet:
        for point in POINTS:
            contexts = needles.contexts(point.num_contexts, first)
            first += len(contexts)
            if point in chosen:
                measure(fleet, point, contexts, needles, recorder)


def measure(fleet: Fleet, point: Point, contexts: Sequence[Context], needles: Needles, recorder: Recorder) -> None:
    """One working set on all servers."""
    repeats = recorder.options.repeats
    everything = len(contexts)
    asked = rounds(contexts, [everything, *[min(everything, LONGEST_ROUND)] * repeats])
    answers: dict[str, list[Answered]] = {name: [] for name in fleet}
    seconds = dict.fromkeys(fleet, 0.0)

    def ask(name: str, number: int) -> dict[str, float]:
        found, took = needles.ask(fleet[name].url, asked[number], CONCURRENCY)
        answers[name] += found
        seconds[name] += took
        return figures(found, took)

    def one(name: str, repetition: int) -> None:
        recorder.add(point.name, name, repetition, ask(name, repetition))

    flush_all(fleet)
    for name, server in fleet.items():
        with alone(server, fleet.values()):
            recorder.add(f"{point.name}, cold start", name, 1, ask(name, 0))
    in_turn(fleet, repeats, one)
    for name in fleet:
        recorder.add(f"{point.name}, all rounds", name, 1, figures(answers[name], seconds[name]))


if __name__ == "__main__":
    main()
