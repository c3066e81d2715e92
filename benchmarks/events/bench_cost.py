"""What watching costs the scheduler's thread: per turn of its loop, per event, per question.

Run: python benchmarks/events/bench_cost.py [--repeats N]

Drives the real tree on the scheduler in miniature that the tests use (tests/helpers/harness.py), without a model. All
times are CPU time of the scheduler's thread, the lower quartile over the repeats; "on" means event socket and metrics
together, with one client that follows. The last column relates the time to a step of 10 ms, a
typical decode step on a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode
from sglang.srt.plugins.hook_registry import HookType, _wrap_fn

from helpers.event_sockets import ipc_config
from helpers.harness import Harness, publish_server_args
from helpers.watched import WatchedHarness
from sgl_kvevict.cache.listener import CacheListener
from sgl_kvevict.config import EventsConfig
from sgl_kvevict.events.client import InspectClient
from sgl_kvevict.events.questions import Status, Tree
from sgl_kvevict.events.types import Dropped
from sgl_kvevict.segments import Segment
from sgl_kvevict.sglang_adapter.monitoring.metrics import Metrics
from sgl_kvevict.sglang_adapter.passes import after_ingest
from sgl_kvevict.sglang_adapter.span_component import FULL

STEP_S = 0.010


def quartile(measure: Callable[[], float], repeats: int) -> float:
    """Lower quartile of several measurements."""
    return sorted(measure() for _ in range(repeats))[repeats // 4]


def per_call(function: Callable[[], object], calls: int) -> float:
    """Seconds of this thread's CPU time for one call."""
    begin = time.thread_time()
    for _ in range(calls):
        function()
    return (time.thread_time() - begin) / calls


def row(name: str, seconds: float, of_step: bool = True) -> None:
    """Print one line of the table."""
    share = f"{100 * seconds / STEP_S:8.4f} %" if of_step else ""
    print(f"{name:<62}{1e6 * seconds:>12.2f} us {share}")


def with_metrics(watched: WatchedHarness) -> None:
    """Add metrics to what a harness has; once per process."""
    metrics = Metrics(watched.harness.tree, watched.listener.totals, {"tp_rank": "0"})
    watched.listener.subscribers.append(metrics.observe)
    watched.listener.each_turn.append(metrics.each_turn)


def publishing_share(watched: WatchedHarness, events_per_s: int) -> float:
    """CPU time of the publishing thread per second, at a rate of events; what of it runs Python holds the GIL."""
    thread = watched.service._thread
    assert thread.ident is not None
    clock = time.pthread_getcpuclockid(thread.ident)
    node = SimpleNamespace(id=3, key=[0] * 50)
    begin, seconds = time.clock_gettime(clock), 2.0
    for _ in range(int(seconds * 100)):
        for _ in range(events_per_s // 100):
            watched.harness.tree.prefixes.listener.emit(Dropped(node.id, 50, 50, False))
        time.sleep(0.01)
    return (time.clock_gettime(clock) - begin) / seconds


def grow(harness: Harness, num_nodes: int) -> None:
    """Insert uncompressed leaves below the root, so that the tree has so many nodes."""
    span_node = next(iter(harness.tree.spans))
    for i in range(num_nodes):
        leaf = UnifiedTreeNode((FULL,))
        leaf.parent, leaf.key = harness.tree.root_node, span_node.key
        leaf.component_data[FULL].value = span_node.component_data[FULL].value
        harness.tree.root_node.children[f"leaf {i}"] = leaf
    leaves = list(harness.tree.root_node.children.values())[: num_nodes // 5]
    harness.tree.spans |= dict.fromkeys(leaves, harness.tree.spans[span_node])


def packed_segment(harness: Harness) -> Segment:
    """A segment as the tree reports it."""
    harness.finish(harness.run([i % 11 for i in range(60)]))
    return next(iter(harness.tree.spans.values())).segment


def follow(config: EventsConfig, stop: threading.Event) -> None:
    """Follow the events in another thread until told to stop."""

    async def read() -> None:
        async with InspectClient(config.endpoint, timeout_s=3600) as client:
            async for _ in client.follow():
                if stop.is_set():
                    return

    thread = threading.Thread(target=lambda: asyncio.run(read()), daemon=True)
    thread.start()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    folder = Path(tempfile.mkdtemp())
    publish_server_args(folder)
    print(f"{'':<62}{'CPU time':>15} {'of 10 ms':>10}")

    tree = Harness().tree
    stock_turn = _wrap_fn(lambda _scheduler: None, lambda *_: None, HookType.AFTER)
    turn = _wrap_fn(lambda _scheduler: [], after_ingest, HookType.AFTER)
    scheduler = SimpleNamespace(tree_cache=tree)
    empty = quartile(lambda: per_call(lambda: stock_turn(scheduler), 20_000), repeats)
    off = quartile(lambda: per_call(lambda: turn(scheduler), 20_000), repeats)
    bare = quartile(lambda: per_call(lambda: (lambda _scheduler: None)(scheduler), 20_000), repeats)
    row("off: one turn of the loop (SGLang's hook wrapper and our check)", off - bare)
    row("  of that SGLang's hook wrapper", empty - bare)
    nobody, node = CacheListener(), SimpleNamespace(id=3, key=[0] * 50)
    telling = quartile(lambda: per_call(lambda: nobody.dropped(node, None, 50), 20_000), repeats)
    row("off: counting one change", telling)

    stop = threading.Event()
    with WatchedHarness(ipc_config(folder)) as watched:
        with_metrics(watched)
        harness = watched.harness
        follow(watched.service.config, stop)
        scheduler.tree_cache = harness.tree
        on = quartile(lambda: per_call(lambda: turn(scheduler), 20_000), repeats)
        row("on: one turn of the loop, nobody asks", on - bare)
        node = SimpleNamespace(id=3, key=[0] * 50)
        listener = harness.tree.prefixes.listener
        dropped = quartile(lambda: per_call(lambda: listener.emit(Dropped(node.id, 50, 50, False)), 2_000), repeats)
        row("on: one event (a node dropped)", dropped)

        segment = packed_segment(harness)
        told = (segment.num_tokens, segment.num_entries, 0, segment.num_slots, 0.001)
        compressed = quartile(lambda: per_call(lambda: listener.compressed([node], segment, *told), 2_000), repeats)
        row("on: one event (a range compressed)", compressed)
        for rate in (0, 1_000):
            share = quartile(lambda rate=rate: publishing_share(watched, rate), 3)
            print(f"{f'on: publishing thread at {rate:,} events a second':<62}{100 * share:>12.2f} %  of a CPU")

        grow(harness, 5_000)
        inspecting = listener.each_turn[0].__self__
        status = quartile(lambda: per_call(lambda: inspecting._reply(harness.tree, Status(limit=50)), 3), repeats)
        row("a 'top' report of a tree with 1,000 spans (once a second)", status, of_step=False)
        look = quartile(lambda: per_call(lambda: inspecting._reply(harness.tree, Tree(5000)), 3), repeats)
        row("an 'inspect' of 5,000 nodes, 1,000 of them spans", look, of_step=False)
        stop.set()


if __name__ == "__main__":
    main()
