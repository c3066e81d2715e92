"""Device time and host time, apart from each other.

A layer takes tens of microseconds on the device, and launching it as long on the host. So launches are queued behind a
device that sleeps, and only then timed: what is measured is the device's work, back to back, as in a captured step.
Every baseline is timed the same way.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from gpu_bench.setting import Setting

CYCLES_PER_SECOND = 2.0e9
"""More than any of these devices has: a sleep is never shorter than meant."""
QUEUED_CALLS = 8
"""Calls behind one sleep; the driver takes about 1,000 launches before it makes the host wait."""
MAX_SLEEP_SECONDS = 0.25


def device_seconds(setting: Setting, call: Callable[[int], object], calls: int = QUEUED_CALLS) -> float:
    """Median time of ``call(i)`` on the device, ``i`` counting up, while the host is ahead of it.

    RuntimeError: the host did not get ahead: the call waits for the device, or launches too much.
    """
    if setting.device != "cuda":
        return wall_seconds(setting, call)
    for i in range(3):
        call(i)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for i in range(calls):
        call(i)
    sleep = 2 * (time.perf_counter() - start) + 1e-4
    times: list[float] = []
    while len(times) < setting.repeats:
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int(sleep * CYCLES_PER_SECOND))
        begin.record()
        for i in range(calls):
            call(i)
        is_ahead = not begin.query()
        end.record()
        end.synchronize()
        if is_ahead:
            times.append(begin.elapsed_time(end) / 1000 / calls)
        elif sleep < MAX_SLEEP_SECONDS:
            sleep *= 2
        else:
            raise RuntimeError("the host does not get ahead of the device: use wall_seconds")
    return sorted(times)[len(times) // 2]


def wall_seconds(setting: Setting, call: Callable[[int], object]) -> float:
    """Median time of ``call(i)`` from an idle device until it is done, launches included."""
    times = []
    for i in range(3 if setting.device == "cuda" else 0):
        call(i)
    for i in range(setting.repeats):
        synchronize(setting)
        start = time.perf_counter()
        call(i)
        synchronize(setting)
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def host_seconds(setting: Setting, call: Callable[[], object]) -> float:
    """Median time that the host spends in ``call``; the device is idle before each."""
    times = []
    for _ in range(max(1, setting.repeats // 3)):
        synchronize(setting)
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def synchronize(setting: Setting) -> None:
    """Wait for the device."""
    if setting.device == "cuda":
        torch.cuda.synchronize()


def copy_bandwidth(setting: Setting) -> float:
    """Bytes per second of a large device copy, read and written bytes counted."""
    size = 2**30 if setting.device == "cuda" else 2**20
    source = torch.ones(size, dtype=torch.uint8, device=setting.device)
    target = torch.empty_like(source)
    return 2 * size / device_seconds(setting, lambda i: target.copy_(source))
