"""Device, sizes and clock of a run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Setting:
    """Sizes of a run.

    Attributes:
        device: "cuda", or "cpu" for a run that only shows that everything works (Triton's interpreter).
        num_layers: layers of the compression sections.
        decode_layers: layers of the decode sections: each call reads another one, so that caches stay cold.
        num_kv_heads: KV heads.
        group_size: q heads per KV head.
        head_dim: width.
        prefix_tokens: tokens of a prefix.
        budget: share of its entries that is kept.
        batches: numbers of requests, each with a prefix of its own.
        sharers: numbers of requests on one prefix.
        suffix_tokens: uncompressed tokens of each request.
        repeats: timed calls.
        model_layers: layers that figures per step are given for.
    """

    device: str
    num_layers: int
    decode_layers: int
    num_kv_heads: int
    group_size: int
    head_dim: int
    prefix_tokens: int
    budget: float
    batches: tuple[int, ...]
    sharers: tuple[int, ...]
    suffix_tokens: int
    repeats: int
    model_layers: int = 32

    @property
    def sm_scale(self) -> float:
        """Softmax scale."""
        return float(self.head_dim**-0.5)

    @property
    def kept_tokens(self) -> int:
        """Average entries per run of a compressed prefix: the token slots that it takes."""
        return max(1, int(self.prefix_tokens * self.budget))

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry, K and V, bfloat16."""
        return 4 * self.head_dim


FULL = Setting("cuda", 32, 8, 8, 4, 128, 32768, 0.2, (1, 8, 64), (1, 2, 4, 8, 16, 32, 64), 128, 30)
SMOKE = Setting("cpu", 2, 2, 2, 4, 16, 96, 0.25, (1, 2), (1, 2), 9, 1)


def median_seconds(setting: Setting, call: Callable[[int], object]) -> float:
    """Median time of ``call(i)`` on the device, ``i`` counting up; the first calls are not counted."""
    times = []
    for i in range(3 if setting.device == "cuda" else 0):
        call(i)
    for i in range(setting.repeats):
        if setting.device == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call(i)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1000)
        else:
            start = time.perf_counter()
            call(i)
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
    return 2 * size / median_seconds(setting, lambda i: target.copy_(source))


@contextlib.contextmanager
def syncs_raise(setting: Setting) -> Iterator[None]:
    """Make torch raise at whatever waits for the device."""
    if setting.device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    yield
    if setting.device == "cuda":
        torch.cuda.set_sync_debug_mode("default")
