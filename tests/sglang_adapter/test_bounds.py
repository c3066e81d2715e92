"""What is remembered beside the cache has limits, and is counted."""

from __future__ import annotations

import gc
import random
import tracemalloc

from helpers.harness import DOCUMENT, Harness, PseudoRandomPolicy
from sgl_kvevict.config import KVEvictConfig
from sgl_kvevict.policies.signals import Signal
from sgl_kvevict.sglang_adapter.monitoring.server_info import read_gauges

VALUES = {"budget": 0.3, "tail_tokens": 4, "sink_tokens": 2, "min_prefix_tokens": 6}
SIZE = 2 * 4 * 4 * (4 * 2 + 4)  # of a prompt's last queries: layers, queries, heads; their floats and log-sum-exp


def lost(harness) -> int:
    return harness.tree.prefixes.totals.refused_no_memory


def test_ranges_that_wait_for_readers_have_a_limit():
    policy = PseudoRandomPolicy(needs=frozenset({Signal.WINDOW_QUERIES}), window_size=4)
    config = KVEvictConfig(**VALUES)
    harness = Harness(num_slots=900, num_rows=8, policy=policy, config=config)
    harness.tree.prefixes.resizer.observation_bytes = 2 * SIZE
    readers = []
    for i in range(4):  # each in use, and two given up
        half_way = harness.request([i, *DOCUMENT, 1])
        assert harness.admit(half_way) and harness.prefill(half_way, 30)
        harness.tree.prefixes.readers[half_way].is_exact = True
        readers += [half_way, harness.run([i, *DOCUMENT, 2])]
        assert read_gauges(harness.tree).observation_bytes == SIZE * min(i + 1, 2)
    assert lost(harness) == len(harness.tree.prefixes.table.open) == 2
    for req in readers:
        harness.finish(req)
    assert read_gauges(harness.tree).observation_bytes == 0


def test_what_waits_until_slots_are_short_is_compressed_before_its_observation_goes():
    policy = PseudoRandomPolicy(needs=frozenset({Signal.WINDOW_QUERIES}), window_size=4)
    config = KVEvictConfig(**VALUES, compress="when short")
    harness = Harness(num_slots=900, policy=policy, config=config)
    harness.tree.prefixes.resizer.observation_bytes = 2 * SIZE
    for i in range(4):
        harness.finish(harness.run([i, *DOCUMENT]))
        assert read_gauges(harness.tree).observation_bytes == SIZE * min(i + 1, 2)
        assert len(harness.tree.prefixes.table.packed) == max(i - 1, 0)
    assert lost(harness) == 0


def week_of_traffic(harness: Harness, rng: random.Random, num_requests: int) -> None:
    """New and old documents, namespaces, aborted readers."""
    for _ in range(num_requests):
        start = rng.choice([rng.randrange(10**6), rng.randrange(5)])
        document = [start % 11, start // 11 % 11, start // 121 % 11, start // 1331 % 11, *DOCUMENT[:40]]
        req = harness.run([*document, rng.randrange(11)], rng.choice([None, f"tenant {start}"]))
        if req is None:
            continue
        if rng.random() < 0.2:
            harness.retract(req)
        else:
            harness.finish(req)


def test_memory_is_flat():
    """A short one, once the pool is full; ``make campaign`` runs a million requests.

    Segments that shrink make room for more nodes, of which memory is used: there are 116 after 100 requests, 179 after
    200, and between 201 and 223 from 300 to 1600.
    """
    harness = Harness(num_slots=900, config=KVEvictConfig(**VALUES))
    harness.check = lambda: None
    rng = random.Random(1)
    sizes = []
    tracemalloc.start()
    for num_requests in (300, 100, 100, 100):
        week_of_traffic(harness, rng, num_requests)
        gc.collect()
        sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert sizes[-1] - sizes[0] < 200_000
