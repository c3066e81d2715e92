"""Cost of tree operations with 10,000 compressed prefixes, and of compressing one; no model, no server.

The same prompts go through SGLang's `UnifiedRadixCache` and through our tree, on SGLang's real pools and request
objects. Each operation is counted in function calls (Python and C; the same on every machine) and in CPU time of its
thread. SGLang's tree has its default core, written in Rust, in which no call is counted, and its Python core beside it.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from typing import Any

import torch
from serving_bench.driver import Driver, StockDriver, StockPythonDriver, build, publish_server_args
from serving_bench.options import Recorder, parse_options
from serving_bench.page import Page, Table
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from helpers.learned import random_scores
from helpers.statistics import random_coding
from kvevict_kernels.rotary import Rotary
from sgl_kvevict.config import Bits, KVEvictConfig
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.policies.by_name import build_policy
from sgl_kvevict.segments.packer import SegmentPacker
from sgl_kvevict.segments.prompt_observation import PromptObservation
from sgl_kvevict.segments.ranker import Compressor
from sgl_kvevict.segments.sources import Source, TokenRange

SYSTEMS = {"stock UnifiedRadixCache": StockDriver, "stock, Python core": StockPythonDriver, "compressed": Driver}
COMPRESSED = "compressed"
WIDTHS: dict[str, Bits] = {COMPRESSED: "auto", "compressed, 16 bits": 16}
"""Bits of rows of what is compressed once; other figures do not depend on them."""
PROMPT_TOKENS = 32
PATH_LENGTHS = (1, 10, 100)
COMPRESSED_TOKENS = (1024, 3000)
TURN_TOKENS = 12

PAGE = Page(
    name="insertion",
    command="python benchmarks/serving/bench_insertion.py",
    summary=(
        "What the tree's operations cost with 10,000 compressed prefixes of 32 tokens, beside "
        "the same prompts in SGLang's `UnifiedRadixCache`; and how they grow with the number of nodes on a path. "
        "`compress` ranks a prefix and packs it at the budget, at the sizes of SmolLM2-135M (30 layers, 3 KV heads), "
        "with the default's rows of 4 bits and with rows of 16. "
        "The first eviction puts all leaves, and all that can shrink, into heaps that are kept; "
        "its calls are those of the second one."
    ),
    tables=(
        Table("calls", "Function calls per operation", digits=0),
        Table("cpu_us", "CPU time per operation, us", digits=1),
    ),
    baseline="stock UnifiedRadixCache",
)


@dataclass(frozen=True)
class Cost:
    """What one operation costs on average."""

    calls: float
    cpu_us: float

    @property
    def metrics(self) -> dict[str, float]:
        """As recorded."""
        return {"calls": self.calls, "cpu_us": self.cpu_us}


def cost_of(operations: Sequence[Callable[[], object]]) -> Cost:
    """Run half of the operations timed, the other half counted."""
    half = len(operations) // 2
    begin = time.thread_time()
    for operation in operations[:half]:
        operation()
    seconds = time.thread_time() - begin
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        for operation in operations[half:]:
            operation()
    finally:
        sys.setprofile(None)
    return Cost(calls / (len(operations) - half), 1e6 * seconds / half)


def prompt(number: int) -> list[int]:
    """A prompt that shares nothing with others."""
    return [number * 64 + i for i in range(PROMPT_TOKENS)]


def match(driver: Driver, tokens: Sequence[int]) -> Any:
    """Match a prefix."""
    return driver.tree.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens), None)))


def lock_and_unlock(driver: Driver, node: object) -> None:
    """Lock a path and let go."""
    driver.tree.unlock(driver.tree.lock(node))


def insert_branch(driver: Driver, tokens: Sequence[int], slots: torch.Tensor) -> None:
    """Insert a new end below a prefix that is there."""
    value = torch.cat([torch.zeros(len(tokens) - slots.numel(), dtype=torch.int64), slots])
    driver.tree.insert(InsertParams(key=RadixKey(array("q", tokens), None), value=value))


def measure_operations(system: str, num_prompts: int, sample: int, seed: int) -> dict[str, Cost]:
    """All operations on a tree of ``num_prompts`` prompts, ``sample`` times each."""
    driver = build(SYSTEMS[system], num_prompts * (PROMPT_TOKENS + 2) + 4000)
    inserts = [lambda i=i: driver.finish(driver.run(prompt(i))) for i in range(num_prompts)]
    for operation in inserts[:-sample]:
        operation()
    costs = {"request with a new prompt": cost_of(inserts[-sample:])}
    chosen = random.Random(seed).sample(range(num_prompts), 4 * sample)
    some, others, more = chosen[:sample], chosen[sample : 2 * sample], chosen[2 * sample : 3 * sample]
    costs["match, hit"] = cost_of([lambda i=i: match(driver, prompt(i)) for i in some])
    costs["match, miss"] = cost_of([lambda i=i: match(driver, [-i - 1, 5, 6]) for i in some])
    nodes = [match(driver, prompt(i)).last_device_node for i in some]
    costs["lock and unlock"] = cost_of([lambda n=n: lock_and_unlock(driver, n) for n in nodes])
    slots = driver.allocator.alloc(4 * sample).view(sample, 4)
    branches = [([*prompt(i), -1, -2, -3, -4], slots[j]) for j, i in enumerate(others)]
    costs["insert a branch"] = cost_of([lambda t=t, s=s: insert_branch(driver, t, s) for t, s in branches])
    costs["match that splits a node"] = cost_of([lambda i=i: match(driver, prompt(i)[:13]) for i in more])
    evictions = [lambda: driver.tree.evict(EvictParams(num_tokens=1))] * 6
    costs["first eviction"] = cost_of(evictions[:2])
    costs["evict one leaf"] = cost_of(evictions)
    return costs


def measure_path(system: str, num_nodes: int, sample: int) -> dict[str, Cost]:
    """Match and split on a path of so many turns, each a node of its own."""
    driver = build(SYSTEMS[system], 4000 + num_nodes * TURN_TOKENS * 2)
    tokens = [i % 251 for i in range(num_nodes * TURN_TOKENS)]
    for turn in range(1, num_nodes + 1):
        driver.finish(driver.run(tokens[: turn * TURN_TOKENS]))
    last = (num_nodes - 1) * TURN_TOKENS
    costs = {f"match, path of {num_nodes} turns": cost_of([lambda: match(driver, tokens)] * sample)}
    cuts = [tokens[: last + 1 + i] for i in range(6)]
    costs[f"split at the end of {num_nodes} turns"] = cost_of([lambda c=c: match(driver, c) for c in cuts])
    return costs


def compression_cost(num_tokens: int, bits: Bits) -> dict[str, float]:
    """Milliseconds of ranking and packing a prefix at the sizes of the demo model, and of two parts of it alone.

    They are writing the rows, and encoding the evicted entries, which the host's memory keeps.

    The default policy on random keys, values and weights: what is kept is of no use, what it costs is the same.
    """
    geometry = KVGeometry(30, 9, 3, 64, num_tokens + 1)
    generator = torch.Generator().manual_seed(1)
    k = torch.randn(30, num_tokens + 1, 3, 64, generator=generator).bfloat16()
    config = KVEvictConfig(bits=bits)
    built = build_policy(config.policy, {})
    assert built is not None
    rotary = Rotary(torch.ones(num_tokens, 64), is_neox=True)
    learned = random_scores(geometry, rotary)
    packer = SegmentPacker(geometry, k, k.clone(), coding=None if bits == 16 else random_coding(geometry, k))
    compressor = Compressor(config, built, packer, learned=learned)
    observation = PromptObservation(compressor.observes)
    window = max(built.scorer.window_size, 1)
    observation.begin_chunk(num_tokens - window, num_tokens, is_last=True)
    for layer in range(30):
        queries = torch.randn(window, 9, 64, generator=generator).bfloat16()
        observation.record(layer, queries, torch.full((window, 9), 8.0), k[layer], 64**-0.5)
    slots = 1 + torch.arange(num_tokens)
    begin = time.perf_counter()
    order = compressor.rank(slots, 0, observation, turn=0)
    tokens = TokenRange(slots, 0, order.keys, config.num_sinks(len(slots)))
    source = Source(geometry, tokens).best(config.num_slots(len(slots)), bits)
    chosen = time.perf_counter()
    packer.copied(source.evicted(left := 16 if bits == 16 else 4), left)
    copied = time.perf_counter()
    packer.rewrite(source, source.fewest_slots)
    end = time.perf_counter()
    seconds = {"wall_ms": end - begin, "write_ms": end - copied, "evict_ms": copied - chosen}
    return {name: 1e3 * value for name, value in seconds.items()}


def main() -> None:
    """Run the benchmark."""
    options = parse_options(__doc__ or "")
    page = replace(
        PAGE,
        tables=(
            *PAGE.tables,
            Table("wall_ms", "Compression, ms", has_ratio=False, digits=1),
            Table("write_ms", "Of these: writing the rows, ms", has_ratio=False, digits=1),
            Table("evict_ms", "Of these: encoding what is evicted, ms", has_ratio=False, digits=1),
        ),
    )
    with tempfile.TemporaryDirectory() as folder:
        publish_server_args(Path(folder))
    num_prompts, sample = (2_000, 100) if options.quick else (10_000, 500)
    recorder = Recorder(page, options, all_points())
    has_trees = any(not point.startswith("compress") for point in options.chosen(all_points()))
    for repetition in range(1, options.repeats + 1):
        for system in SYSTEMS if has_trees else ():
            costs = measure_operations(system, num_prompts, sample, repetition)
            for length in PATH_LENGTHS:
                costs |= measure_path(system, length, 40)
            for point, cost in costs.items():
                recorder.add(point, system, repetition, cost.metrics)
        measure_compressions(recorder, repetition)
    recorder.close()


def measure_compressions(recorder: Recorder, repetition: int) -> None:
    """One compression of each size; a first one warms up."""
    for num_tokens in COMPRESSED_TOKENS:
        for system, bits in WIDTHS.items():
            if repetition == 1:
                compression_cost(num_tokens, bits)
            recorder.add(f"compress {num_tokens} tokens", system, repetition, compression_cost(num_tokens, bits))


def all_points() -> list[str]:
    """Points in the order of the tables."""
    operations = ["match, hit", "match, miss", "lock and unlock", "match that splits a node", "insert a branch"]
    operations += ["first eviction", "evict one leaf", "request with a new prompt"]
    paths = [text for n in PATH_LENGTHS for text in (f"match, path of {n} turns", f"split at the end of {n} turns")]
    return operations + paths + [f"compress {n} tokens" for n in COMPRESSED_TOKENS]


if __name__ == "__main__":
    main()
