"""Decode speed over batch, length of a shared prefix, and budget; stock and ours in turn.

All requests of a batch share one prefix and ask different short questions. Tokens per second are counted while all of
them generate.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from serving_bench.fleet import DEFAULT, Fleet, compared_systems, flush_all
from serving_bench.options import Recorder, measure_points, parse_options
from serving_bench.page import Page, Table
from serving_bench.streams import Stream, decode_figures, stream_all
from serving_bench.texts import document, question

from kvevict_tools.measure import in_turn

POOL_SLOTS = 10_000
BUDGETS = (1.0, 0.5, 0.1)
"""Budgets beside the default, 0.2."""


@dataclass(frozen=True)
class Point:
    """One shared prefix length and one batch size; stock generates fewer tokens, because it is slow."""

    prefix: int
    batch: int
    tokens: int
    stock_tokens: int

    @property
    def name(self) -> str:
        """As shown in tables."""
        return f"prefix {self.prefix}, batch {self.batch}"


POINTS = (
    Point(3000, 1, 48, 16),
    Point(4096, 1, 48, 12),
    Point(4096, 8, 24, 8),
)
UNGROUPED = POINTS[2]
"""Where the shared read is compared with one read per request."""
UNGROUPED_SYSTEM = f"{DEFAULT}, ungrouped"
QUICK = (Point(3000, 1, 24, 12),)

PAGE = Page(
    name="decode",
    command="python benchmarks/serving/bench_decode.py",
    summary=(
        "Decode speed of a batch that shares one cached prefix. Budget 1.0 is our attention backend without "
        "compression; what smaller budgets gain beyond it is compression's. `ungrouped` is the same batch with the "
        "prefix cached once for each request: nothing is read for several of them at once."
    ),
    tables=(
        Table("decode_tokens_per_s", "Decode, tokens/s of the whole batch", digits=1),
        Table("inter_token_ms", "Between two tokens of one request, median ms", digits=1),
        Table("ttft_s", "First token, prefix cached, median s"),
    ),
)


def main() -> None:
    """Run the benchmark."""
    options = parse_options(__doc__ or "")
    systems = compared_systems(POOL_SLOTS, budgets=() if options.quick else BUDGETS, beside=options.beside)
    measure_points(PAGE, options, QUICK if options.quick else POINTS, systems, measure)


def measure(fleet: Fleet, point: Point, recorder: Recorder) -> None:
    """One point on all servers."""
    model, repeats = recorder.options.model, recorder.options.repeats
    prefix = document(model, point.prefix, point.prefix)
    flush_all(fleet)
    for name, server in fleet.items():
        recorder.progress(f"{point.name}: caching the prefix on {name}")
        stream_all(server.url, [prefix], 1)
        stream_all(server.url, [prefix + question(model, 0)], 2)

    def one(name: str, repetition: int) -> None:
        streams = ask(fleet, name, point, prefix, model, repetition)
        recorder.add(point.name, name, repetition, decode_figures(streams))

    in_turn(fleet, repeats, one)
    if point == UNGROUPED:
        recorder.progress(f"{point.name}: caching the prefix {point.batch} times")
        for key in keys_of(point):
            stream_all(fleet[DEFAULT].url, [prefix], 1, [key])
        # The copies leave no room for the shared prefix, so stock takes part once more.
        both = {**fleet, UNGROUPED_SYSTEM: fleet[DEFAULT]}
        names = ["stock", UNGROUPED_SYSTEM]
        in_turn(both, repeats, lambda name, repetition: one(name, repeats + repetition), names)


def ask(fleet: Fleet, name: str, point: Point, prefix: list[int], model: Path, repetition: int) -> list[Stream]:
    """New questions on the prefix, or on one copy of it for each request: then no two of them read the same span."""
    prompts = [prefix + question(model, repetition * 100 + i) for i in range(point.batch)]
    if name == UNGROUPED_SYSTEM:
        return stream_all(fleet[DEFAULT].url, prompts, point.tokens, keys_of(point))
    return stream_all(fleet[name].url, prompts, point.stock_tokens if name == "stock" else point.tokens)


def keys_of(point: Point) -> list[str]:
    """One namespace for each request."""
    return [f"user {i}" for i in range(point.batch)]


if __name__ == "__main__":
    main()
