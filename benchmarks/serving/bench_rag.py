"""Questions on documents drawn by a Zipf law, from a cold cache, without any call that warms it up.

SGLang's own client and generator. The tree must find the shared part by itself, while the same documents are asked for
again. Every repetition starts empty, with other documents.
"""

from __future__ import annotations

from dataclasses import dataclass

from serving_bench.fleet import Fleet, compared_systems, running
from serving_bench.options import LOGS, Recorder, parse_options
from serving_bench.page import Page, Table
from serving_bench.sglang_client import Workload, held_slots, run_client

from kvevict_tools.measure import flush, in_turn

POOL_SLOTS = 6144
CONCURRENCY = 2


@dataclass(frozen=True)
class Point:
    """Documents, their length, and requests of a repetition."""

    num_documents: int
    tokens: int
    requests: int

    @property
    def name(self) -> str:
        """As shown in tables."""
        return f"{self.num_documents} documents of {self.tokens}, {self.requests} questions"


POINTS = (Point(32, 1024, 32),)
QUICK = (Point(16, 1024, 12),)

PAGE = Page(
    name="rag",
    command="python benchmarks/serving/bench_rag.py",
    summary=(
        f"SGLang's `bench_serving` client, documents drawn by a Zipf law (exponent 1.1), questions of 32 tokens, 8 "
        f"generated tokens, {CONCURRENCY} requests at a time, a pool of {POOL_SLOTS:,} token slots. The cache is empty "
        "at the start of each repetition."
    ),
    tables=(
        Table("requests_per_s", "Requests/s"),
        Table("ttft_ms", "First token, median ms", digits=0),
        Table("hit_rate_pct", "Prompt tokens found in the cache, %", has_ratio=False, digits=0),
        Table("held_slots", "Token slots held at the end", has_ratio=False, digits=0),
    ),
)


def main() -> None:
    """Run the benchmark."""
    options = parse_options(__doc__ or "")
    points = {point.name: point for point in (QUICK if options.quick else POINTS)}
    recorder = Recorder(PAGE, options, list(points))
    systems = compared_systems(POOL_SLOTS, budgets=() if options.quick else (1.0,), beside=options.beside)
    with running(systems, options.model, LOGS / PAGE.name, recorder.progress) as fleet:
        for name in options.chosen(list(points)):
            measure(fleet, points[name], recorder)
    recorder.close()


def measure(fleet: Fleet, point: Point, recorder: Recorder) -> None:
    """One set of documents on all servers."""
    model = recorder.options.model

    def one(name: str, repetition: int) -> None:
        per_document = -(-point.requests // point.num_documents)
        rows = Workload(point.num_documents, per_document, point.tokens, 32, 8, zipf_alpha=1.1, seed=repetition)
        server = fleet[name]
        flush(server)
        figures = run_client(server.url, model, rows.rows(model)[: point.requests], CONCURRENCY)
        recorder.add(point.name, name, repetition, figures | {"held_slots": held_slots(server)})

    in_turn(fleet, recorder.options.repeats, one)


if __name__ == "__main__":
    main()
