"""Prompt tokens that prefix caches find of coding agents' conversations, and seconds of prefill, over memory.

Run: make bench-traces, or python benchmarks/traces/run.py [--seeds 1 2 3] [--systems ours "stock, LRU"] [--out OUT]

Real conversations (data/README.md) are replayed through SGLang's tree and ours: real requests, allocator and life
cycle, many agents at once. No model runs, and no K or V is computed: which entries are kept is random, and a clock
counts seconds by roofline. One token slot stands for 64 tokens, which the traces cannot tell apart. Memory is a share
of the working set: the most tokens that the conversations under way have between them at any time.

Writes agents.csv, .md and .png; rows of points that are not run again stay. Fewer requests than the default write to
out/traces.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

os.environ.setdefault("SGLANG_PLATFORM", "kvevict_cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "quality"))

from kvevict_quality.origin import commit
from trace_bench.clock import Machine
from trace_bench.conversations import MAX_CONTEXT, UNIT, Sample
from trace_bench.page import draw, write_page
from trace_bench.replay import Everything, Replay
from trace_bench.rows import Row, read, write
from trace_bench.systems import SYSTEMS

from helpers.harness import publish_server_args

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "docs" / "results" / "traces"
SHARES = tuple(2.0**-power for power in range(6, -1, -1))
CLIENTS = 128
"""Agents at once: so many that 1/64 of the working set holds the longest prompt."""
REQUESTS = 512
WARM_UP = 153
"""Of these requests the first, which are not counted: caches fill."""
SEEDS = (1, 2, 3)
ABOUT = """\
Replayed: {requests:,} requests of {clients} coding agents at once, the first {warm_up:,} not counted, from
[500 real conversations](https://github.com/callanjfox/kv-cache-tester) (WEKA, Apache-2.0, without text;
`benchmarks/traces/data`), in random order by seed ({seeds} seeds, medians). Requests beyond the model's context of
{context:,} tokens are left out. Conversations whose tools and system prompts have equal lengths share them. An agent
sends its next request as long after an answer as in its trace. Trees, allocators and requests are real; no model runs.
One token slot stands for {unit} tokens.

Columns: token slots of the pool as a share of the working set, the most tokens that the conversations under way have
between them at any time ({sets} M tokens, by seed). Host tiers hold twice the bytes of the pool beside it.

Clock: {machine.name}, by roofline: a prefill reaches {machine.flops_share:.0%} of the operations per second, a decode
step {machine.bandwidth_share:.0%} of the bandwidth, a load from the host {link:.0f} GB/s. Ranking and packing are not
in it. The grey line is the pool of one H100 ({slots:,} tokens).

* *hits per token*: the rule of SGLang's pull request 30300 (fewest hits per token go first) in SGLang's tree.
* *HiCache 2x*: a model, because the real one needs a GPU: behind SGLang's tree an LRU of units that are written when
  an answer is complete. *codec 20x*: the same with 20 times the units, as much as KVTC claims, and no time to decode.
* *nothing compressed*: our tree with policy `none`. *ours*: with the defaults; the host's memory only where
  named. Which entries are kept is random; found tokens and bytes do not depend on it, what answers are worth does.

**Found is not answered.** The last table has what each system keeps of what it finds; what answers are worth with so
much of a prefix is on the [quality page](../../quality.md).

Commit {commit}; {minutes:.0f} minutes of one core: `make bench-traces`."""
H100_SLOTS = int(0.85 * 80e9 - 2 * Machine().parameters) // Machine().kv_bytes
"""Tokens that the pool of one H100 holds beside the model (`--mem-fraction-static 0.85`)."""


@dataclass(frozen=True)
class Task:
    """One point: a system, its pool, and a sample of conversations."""

    system: str
    share: float
    seed: int
    clients: int
    requests: int


@cache
def conversations(seed: int, clients: int, requests: int) -> tuple[Sample, int]:
    """A sample, and its working set in units."""
    known = Sample(seed)
    replay = Replay(Everything(), known, Machine(), clients=clients, warm_up=WARM_UP * requests // REQUESTS)
    replay.run(requests)
    return known, replay.most_live


def measure(task: Task) -> Row:
    """Replay one sample on one system."""
    known, working_set = conversations(task.seed, task.clients, task.requests)
    slots = int(task.share * working_set)
    system = next(each for each in SYSTEMS if each.name == task.system)
    begin = time.perf_counter()
    warm_up = WARM_UP * task.requests // REQUESTS
    totals = Replay(system.build(slots), known, Machine(), clients=task.clients, warm_up=warm_up).run(task.requests)
    found = max((totals.pool + totals.host) / UNIT, 1)
    return Row(
        system=task.system,
        share=task.share,
        seed=task.seed,
        slots=slots,
        requests=totals.requests,
        prompt_tokens=totals.prompt,
        pool=totals.pool / totals.prompt,
        host=totals.host / totals.prompt,
        kept_bytes=totals.kept.num_bytes / found,
        kept_entries=totals.kept.entries / found,
        kept_bits=totals.kept.bits / max(totals.kept.entries, 1),
        prefill_s=totals.prefill_s,
        load_s=totals.load_s,
        first_token_s=statistics.median(totals.first_token_s),
        clock_s=totals.seconds,
        replay_s=time.perf_counter() - begin,
    )


def start_process() -> None:
    """Make SGLang's process-wide configuration."""
    with tempfile.TemporaryDirectory() as folder:
        publish_server_args(Path(folder))


def about(rows: list[Row], args: argparse.Namespace) -> str:
    """What was replayed, on what, and how long it took."""
    sets = {row.seed: f"{row.slots / row.share * UNIT / 1e6:.1f}" for row in rows}
    machine = Machine()
    return ABOUT.format(
        requests=args.requests,
        clients=args.clients,
        warm_up=WARM_UP * args.requests // REQUESTS,
        seeds=len(sets),
        context=MAX_CONTEXT,
        unit=UNIT,
        sets=", ".join(sets.values()),
        machine=machine,
        link=machine.link / 1e9,
        slots=H100_SLOTS,
        commit=commit(),
        minutes=sum(row.replay_s for row in rows) / 60,
    )


def main() -> None:
    """Run what was asked for, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="*", default=list(SEEDS), help="none: only write the page anew")
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--shares", type=float, nargs="*", default=list(SHARES))
    parser.add_argument("--systems", nargs="*", default=[], help="names, default: all; rows of others stay as they are")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    out = args.out or (OUT if args.requests >= REQUESTS else ROOT / "out" / "traces")
    names = args.systems or [system.name for system in SYSTEMS]
    tasks = [
        Task(name, share, seed, args.clients, args.requests)
        for seed, share, name in product(args.seeds, args.shares, names)
    ]
    path = out / "agents.csv"
    rows = {row.point: row for row in (read(path) if path.exists() else [])}
    with ProcessPoolExecutor(args.processes, initializer=start_process) as pool:
        for future in as_completed([pool.submit(measure, task) for task in tasks]):
            row = future.result()
            rows[row.point] = row
            write(path, list(rows.values()))
            print(
                f"{row.system:30}{row.share:8.4f}{row.seed:3}  found {row.found:6.1%}  {row.replay_s:5.1f} s",
                flush=True,
            )
    order = [system.name for system in SYSTEMS]
    done = sorted(rows.values(), key=lambda row: (order.index(row.system), row.share, row.seed))
    write(path, done)
    share = statistics.median(H100_SLOTS / UNIT / (row.slots / row.share) for row in done)
    write_page(path.with_suffix(".md"), done, about(done, args))
    draw(path.with_suffix(".png"), done, (share, "pool of one H100"))
    print(f"wrote {path.with_suffix('')}.{{csv,md,png}}")


if __name__ == "__main__":
    main()
