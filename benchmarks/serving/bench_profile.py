"""Where the time of a decode step and of a prefill goes, and what the floor of each cost is.

The servers time what their forwards call (``timers/kvevict_timers.py``). Floors are the bytes that must be read over
the bandwidth of this machine, or the operations over its speed, both measured in the run.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from serving_bench.fleet import compared_systems, flush_all, running
from serving_bench.options import LOGS, Recorder, parse_options
from serving_bench.page import Page, Table
from serving_bench.streams import decode_figures, stream_all
from serving_bench.texts import document, question
from serving_bench.timing import COSTS, FORWARDS, Phase, seconds_in, with_timers

from kvevict_tools.launcher import RunningServer, has_fast_bfloat16
from kvevict_tools.measure import alone, flush, wait_until_scored

POOL_SLOTS = 10_000
BUDGETS = (1.0,)
OTHER = "scheduler, sampling, tokens out"
SHOWN = (*COSTS, OTHER)
WHOLE = "all"
FLOOR = "floor at budget 0.2"
DTYPE = torch.bfloat16 if has_fast_bfloat16() else torch.float32
"""In which the servers hold weights, keys and values, and compute."""
DTYPE_NAME = str(DTYPE).removeprefix("torch.")


@dataclass(frozen=True)
class Workload:
    """Requests that do one thing most of the time.

    Attributes:
        prefix: tokens of the shared prefix; for a prefill, of each prompt.
        batch: requests at a time.
        tokens: that each request generates; 1 for a prefill.
    """

    prefix: int
    batch: int
    tokens: int

    @property
    def is_prefill(self) -> bool:
        """Nothing is cached and one token is generated."""
        return self.tokens == 1

    @property
    def name(self) -> str:
        """As shown in tables."""
        if self.is_prefill:
            return f"prefill of {self.prefix}"
        return f"decode, prefix {self.prefix}, batch {self.batch}"

    @property
    def runs(self) -> int:
        """How often the requests are sent: a prefill is short."""
        return 4 if self.is_prefill else 1


WORKLOADS = (Workload(3000, 1, 250), Workload(4096, 8, 60), Workload(3000, 1, 1))
QUICK = (Workload(3000, 1, 40),)

PAGE = Page(
    name="profile",
    command="python benchmarks/serving/bench_profile.py",
    summary=(
        "Means of what a server's functions take themselves in one decode step, or one prefill, timed in the server; "
        f"`{OTHER}` is the rest of the time that the client saw. The floor of linear layers and of attention is, in a "
        "decode step, the bytes that have to be read over the measured bandwidth of this machine's memory; in a "
        f"prefill, the operations over the measured speed of a large {DTYPE_NAME} matrix product. The other costs move "
        "a few kB a layer: their floor is next to nothing, and what they take is calls."
    ),
    tables=(Table("ms", "Time by cost, ms", has_ratio=False, digits=1),),
)


@dataclass(frozen=True)
class Machine:
    """What this machine can do: bytes read and operations, both per second."""

    bandwidth: float
    flops: float


@dataclass(frozen=True)
class Model:
    """Sizes of a model that floors follow from; ``weights`` of all layers, ``output_weights`` of the output layer."""

    layers: int
    qo_heads: int
    kv_heads: int
    head_dim: int
    weights: int
    output_weights: int

    def kv_bytes(self, tokens: float) -> float:
        """Bytes of K and V of so many tokens."""
        return tokens * self.layers * self.kv_heads * self.head_dim * 2 * DTYPE.itemsize


def main() -> None:
    """Run the benchmark."""
    options = parse_options(__doc__ or "", repeats=1)
    workloads = QUICK if options.quick else WORKLOADS
    names = [workload.name for workload in workloads]
    recorder = Recorder(PAGE, options, [f"{name}: {cost}" for name in names for cost in (*SHOWN, WHOLE)])
    machine, model = measure_machine(), read_model(options.model)
    recorder.progress(f"{machine.bandwidth / 1e9:.1f} GB/s read, {machine.flops / 1e9:.0f} GFLOP/s in {DTYPE_NAME}")
    systems = compared_systems(POOL_SLOTS, budgets=BUDGETS, beside=options.beside)
    systems, files = with_timers(systems, LOGS / PAGE.name)
    with running(systems, options.model, LOGS / PAGE.name, recorder.progress) as fleet:
        for workload in workloads:
            if workload.name not in options.chosen(names):
                continue
            flush_all(fleet)
            for name, server in fleet.items():
                for repetition in range(1, options.repeats + 1):
                    with alone(server, fleet.values()):
                        found = profile(server, files[name], workload, options.model, repetition)
                    for cost, ms in found.items():
                        recorder.add(f"{workload.name}: {cost}", name, repetition, {"ms": ms})
            for cost, seconds in floors(workload, model, machine, budget=0.2).items():
                recorder.add(f"{workload.name}: {cost}", FLOOR, 1, {"ms": 1e3 * seconds})
    recorder.close()


def profile(server: RunningServer, file: Path, workload: Workload, model: Path, repetition: int) -> dict[str, float]:
    """Milliseconds of one step by cost; ``file`` is what the server's timers write."""
    prefix = document(model, workload.prefix, workload.prefix + repetition)
    if not workload.is_prefill:
        stream_all(server.url, [prefix], 1)
        stream_all(server.url, [prefix + question(model, 0)], 2)
        wait_until_scored(server)

    def run(first_question: int) -> float:
        """Milliseconds of a step."""
        asked = [prefix + question(model, first_question + i) for i in range(workload.batch)]
        if workload.is_prefill:
            flush(server)
            return 1e3 * stream_all(server.url, asked, 1)[0].ttft_s
        figures = decode_figures(stream_all(server.url, asked, workload.tokens))
        return 1e3 * workload.batch / figures["decode_tokens_per_s"]

    run(100 * repetition)
    phase: Phase = "prefill" if workload.is_prefill else "decode"
    before = seconds_in(file, phase)
    step_ms = statistics.mean(run(100 * repetition + 10 * (again + 1)) for again in range(workload.runs))
    after = seconds_in(file, phase)
    steps = workload.runs if workload.is_prefill else after[FORWARDS] - before[FORWARDS]
    found = {cost: 1e3 * (after[cost] - before[cost]) / steps for cost in COSTS}
    return found | {OTHER: step_ms - sum(found.values()), WHOLE: step_ms}


def floors(workload: Workload, model: Model, machine: Machine, budget: float) -> dict[str, float]:
    """Least seconds of a step for the costs that bytes or operations bound."""
    if not workload.is_prefill:
        kept = budget * workload.prefix + workload.batch * workload.tokens / 2
        return {
            "linear layers": (model.weights + model.output_weights) * DTYPE.itemsize / machine.bandwidth,
            "attention": model.kv_bytes(kept) / machine.bandwidth,
        }
    pairs = workload.prefix**2 / 2
    return {
        "linear layers": 2 * model.weights * workload.prefix / machine.flops,
        "attention": 4 * pairs * model.layers * model.qo_heads * model.head_dim / machine.flops,
        "compression": model.kv_bytes(workload.prefix * (0.5 + budget)) / machine.bandwidth,
    }


def measure_machine() -> Machine:
    """Best of a few runs of reading 512 MiB, and of a product of two matrices of 2,048 squared in the served dtype."""
    numbers = torch.ones(2**27)
    matrix = torch.ones(2048, 2048, dtype=DTYPE)
    read_s = best_seconds(lambda: numbers.sum())
    product_s = best_seconds(lambda: matrix @ matrix)
    return Machine(numbers.numel() * 4 / read_s, 2 * 2048**3 / product_s)


def best_seconds(work: Callable[[], object], runs: int = 5) -> float:
    """Shortest of a few runs, after one that does not count."""
    found = []
    for _ in range(runs + 1):
        begin = time.perf_counter()
        work()
        found.append(time.perf_counter() - begin)
    return min(found[1:])


def read_model(folder: Path) -> Model:
    """Sizes from ``config.json`` of a Llama model."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    qo_heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = hidden // qo_heads
    attention = 2 * hidden * qo_heads * head_dim + 2 * hidden * kv_heads * head_dim
    mlp = 3 * hidden * config["intermediate_size"]
    return Model(layers, qo_heads, kv_heads, head_dim, layers * (attention + mlp), hidden * config["vocab_size"])


if __name__ == "__main__":
    main()
