"""GPU sizes without a GPU: the same tree code fed with a trace, and the bytes that a decode step must read.

The simulation runs SGLang's request life cycle on pools as large as a GPU's, without a model: hit rates and slots are
those of a server that gets these requests one after the other. The roofline is arithmetic: bytes over bandwidth.
"""

from __future__ import annotations

import random
import tempfile
from bisect import bisect
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from serving_bench.driver import Driver, StockDriver, build, publish_server_args
from serving_bench.options import Options, Recorder, parse_options
from serving_bench.page import Page, Table

from sgl_kvevict.config import KVEvictConfig

BUDGETS = (0.5, 0.2, 0.1)
DOCUMENT_TOKENS = 4096
QUESTION_TOKENS = 64
ZIPF_ALPHA = 0.9
GIB = 2**30


@dataclass(frozen=True)
class Model:
    """A model on the accelerators it is usually served with; sizes in bytes, bandwidth in bytes per second."""

    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    weight_bytes: float
    memory_bytes: float
    bandwidth: float

    @property
    def token_bytes(self) -> int:
        """K and V of one token in 16 bit."""
        return self.num_layers * self.num_kv_heads * self.head_dim * 2 * 2

    @property
    def pool_slots(self) -> int:
        """Token slots in what the weights leave of 90 % of the memory."""
        return int((0.9 * self.memory_bytes - self.weight_bytes) / self.token_bytes)


MODELS = (
    Model("8B on 1 x 80 GiB", 32, 8, 128, 16.1e9, 80 * GIB, 3.35e12),
    Model("70B on 8 x 80 GiB", 80, 8, 128, 141e9, 8 * 80 * GIB, 8 * 3.35e12),
)

SIMULATION = Page(
    name="scale",
    command="python benchmarks/serving/bench_scale.py",
    summary=(
        f"Documents of {DOCUMENT_TOKENS:,} tokens, drawn by a Zipf law (exponent {ZIPF_ALPHA}), with a new question of "
        f"{QUESTION_TOKENS} tokens each time, one request after the other; the first half of the trace fills the cache "
        "and is not counted. Stock is SGLang's `UnifiedRadixCache`."
    ),
    tables=(
        Table("hit_rate_pct", "Prompt tokens found in the cache, %", digits=1),
        Table("documents_held", "Documents held", digits=0),
        Table("held_slots", "Token slots held", has_ratio=False, digits=0),
    ),
)
FULL = "full, read per request"
ROOFLINE = Page(
    name="roofline",
    command="python benchmarks/serving/bench_scale.py",
    summary=(
        "Bytes that one decode step reads: weights, the shared prefix (kept share; once, or once per request), and 256 "
        "tokens of each request's own. Time is bytes over memory bandwidth (3.35 TB/s per device): a floor, not a "
        "measurement. `full, read per request` is what attention without grouping reads of an uncompressed prefix."
    ),
    tables=(
        Table("gigabytes", "GB read per decode step", digits=1),
        Table("floor_ms", "Floor of a decode step, ms", has_ratio=False),
    ),
    baseline=FULL,
)


def main() -> None:
    """Run the simulation and write both pages."""
    options = parse_options(__doc__ or "", repeats=1)
    with tempfile.TemporaryDirectory() as folder:
        publish_server_args(Path(folder))
    populations = (1_000,) if options.quick else (1_000, 1_000_000)
    points = {f"{model.name}, {n:,} documents": (model, n) for model in MODELS for n in populations}
    recorder = Recorder(SIMULATION, options, list(points))
    num_requests = 400 if options.quick else 10_000
    for name in options.chosen(list(points)):
        model, population = points[name]
        for repetition in range(1, options.repeats + 1):
            trace = zipf_trace(population, num_requests, repetition)
            recorder.add(name, "stock", repetition, simulate(model.pool_slots, trace, None))
            for budget in BUDGETS:
                recorder.add(name, f"budget {budget:g}", repetition, simulate(model.pool_slots, trace, budget))
    recorder.close()
    write_roofline(options)


def zipf_trace(population: int, num_requests: int, seed: int) -> list[int]:
    """Which document each request asks about."""
    chooser = random.Random(seed)
    weights = list(accumulate(1.0 / rank**ZIPF_ALPHA for rank in range(1, population + 1)))
    return [bisect(weights, chooser.random() * weights[-1]) for _ in range(num_requests)]


def simulate(pool_slots: int, trace: list[int], budget: float | None) -> dict[str, float]:
    """Run a trace through the tree; ``budget`` None is stock."""
    config = None if budget is None else KVEvictConfig(budget=budget)
    driver = build(StockDriver if budget is None else Driver, pool_slots, config)
    found = total = 0
    for number, document in enumerate(trace):
        first = document * DOCUMENT_TOKENS
        question = -1 - number * QUESTION_TOKENS
        tokens = [*range(first, first + DOCUMENT_TOKENS), *range(question, question - QUESTION_TOKENS, -1)]
        request = driver.request(tokens)
        if not driver.admit(request):
            raise RuntimeError(f"request {number} was not admitted")
        if number >= len(trace) // 2:
            found += request.prefix_len
            total += len(tokens)
        if not driver.prefill(request):
            raise RuntimeError(f"no slots for request {number}")
        driver.finish(request)
    return {
        "hit_rate_pct": 100 * found / total,
        "documents_held": float(len(driver.tree.root_node.children)),
        "held_slots": float(pool_slots - driver.allocator.available_size()),
    }


def write_roofline(options: Options) -> None:
    """Bytes per decode step over prefix length, batch and budget."""
    cases = [(model, prefix, batch) for model in MODELS for prefix in (8_192, 32_768, 131_072) for batch in (1, 16)]
    names = [f"{model.name}, prefix {prefix:,}, batch {batch}" for model, prefix, batch in cases]
    recorder = Recorder(ROOFLINE, options, names)
    for name, (model, prefix, batch) in zip(names, cases, strict=True):
        systems = {FULL: batch * prefix, "full, read once": prefix}
        systems |= {f"budget {budget:g}, read once": prefix * budget for budget in BUDGETS}
        for system, tokens in systems.items():
            size = model.weight_bytes + model.token_bytes * (tokens + batch * 256)
            metrics = {"gigabytes": size / 1e9, "floor_ms": 1e3 * size / model.bandwidth}
            recorder.add(name, system, 1, metrics)
    recorder.close()


if __name__ == "__main__":
    main()
