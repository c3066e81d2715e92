"""Servers under load: every way to schedule, and one hour at saturation."""

from __future__ import annotations

import os
import time

from campaign.parts import Counts
from campaign.servers import error_lines, resident_mb, server

from helpers.modes import CONFIG, MODES, assert_nothing_leaked, serve_readers

MAX_GROWTH_MB = 100.0


def modes(seed: int, share: float) -> Counts:
    """One way to schedule."""
    name = list(MODES)[seed % len(MODES)]
    count = int(300 * share)
    cores = sorted(os.sched_getaffinity(0))
    env = {"SGLANG_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"} if name == "data-parallel" else {}
    with server(*MODES[name], config=CONFIG, env=env) as running:
        taken_off = serve_readers(running, count, seed=seed, priorities=name.startswith("priority"))
        compressions = assert_nothing_leaked(running)
    assert compressions > 0 and (taken_off or not name.startswith("priority")), (compressions, taken_off)
    counts = {f"requests with {name}": count, f"taken off and run again with {name}": taken_off}
    return {"done": count, "compressions": compressions, **{what: number for what, number in counts.items() if number}}


def soak(seed: int, share: float) -> Counts:
    """An hour at saturation; memory of all processes must be flat after the first sixth of it."""
    minutes = 60 * share
    sizes, number, compressions = [], 0, 0
    with server(config=CONFIG) as running:
        end = time.monotonic() + 60 * minutes
        while time.monotonic() < end:
            number += 1
            serve_readers(running, 200, seed=seed * 10_000 + number, priorities=False)
            sizes.append(resident_mb(running))
        compressions = assert_nothing_leaked(running)
        errors = error_lines(running)
        assert not errors, errors[:3]
    early = max(sizes[: max(len(sizes) // 6, 1)])
    assert sizes[-1] < early + MAX_GROWTH_MB, f"{early:.0f} MB early, {sizes[-1]:.0f} MB at the end"
    largest = {"largest MB in the first sixth": early, "largest MB at the end": sizes[-1]}
    return {"done": minutes, "requests": 200 * number, "compressions": compressions, **largest}
