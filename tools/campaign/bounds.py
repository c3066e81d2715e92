"""A week's traffic in fast motion through the tree: memory stays where it is."""

from __future__ import annotations

import gc
import random
import resource

from campaign.machine import build
from campaign.parts import Counts

from sgl_kvevict.sglang_adapter.monitoring.server_info import cache_state

POLICIES = ("random", "snapkv")
MAX_GROWTH_MB = 40.0


def unit(seed: int, share: float) -> Counts:
    """One cache under thousands of requests; the second half must not need more memory than the first."""
    harness = build(POLICIES[seed % len(POLICIES)], {})
    harness.check = lambda: None  # type: ignore[method-assign]
    rng = random.Random(seed)
    half = int(10_000 * share)
    _traffic(harness, rng, half)
    before = _resident_mb()
    _traffic(harness, rng, half)
    growth = _resident_mb() - before
    assert growth < MAX_GROWTH_MB, f"seed {seed}: {growth:.0f} MB more after {half} requests"
    state = cache_state(harness.tree)
    assert state["observation_bytes"] <= 2 * harness.tree.prefixes.resizer.observation_bytes
    assert not any(harness.tree.guard.errors.values())
    return {"done": 2 * half, "compressions": state["compressions"], "largest growth (MB)": growth}


def _traffic(harness, rng: random.Random, num_requests: int) -> None:
    for _ in range(num_requests):
        document = rng.choice([rng.randrange(10**6), rng.randrange(5)])
        tokens = [document // 11**i % 11 for i in range(6)] + [i * 7 % 11 for i in range(30)]
        req = harness.run([*tokens, rng.randrange(11)], rng.choice([None, f"tenant {document}"]))
        if req is not None:
            harness.retract(req) if rng.random() < 0.2 else harness.finish(req)


def _resident_mb() -> float:
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20
