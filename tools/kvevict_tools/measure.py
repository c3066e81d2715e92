"""Measurements over HTTP of stock SGLang and of SGLang with this plugin, for the demo, tests and benchmarks."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from kvevict_tools.launcher import RunningServer

_GAUGE = re.compile(r"^sglang:(\w+)\{[^}]*\} (\S+)$", re.MULTILINE)
_POOL_GAUGES = ("max_total_num_tokens", "kv_available_tokens", "kv_evictable_tokens", "num_running_reqs")
#: A short prompt; no other prompt of the demo begins with its first token.
_PROBE_IDS = (28, 30, 31)
_PROBE_TOKENS = 4
_STABLE_S = 1.5
"""Seconds without a change after which gauges count as those of an idle server."""


@dataclass(frozen=True)
class PoolGauges:
    """SGLang's own gauges of its KV pool, in token slots."""

    total: int
    available: int
    evictable: int
    running: int

    @property
    def missing(self) -> int:
        """Slots neither free nor evictable; 0 when no request runs and nothing leaked."""
        return self.total - self.available - self.evictable


@dataclass(frozen=True)
class StreamTiming:
    """Speed of one streamed request.

    Attributes:
        ttft_s: seconds until the first token.
        decode_tokens_per_s: tokens after the first, over the time between first and last; 0.0 for one token.
    """

    prompt_tokens: int
    cached_tokens: int
    ttft_s: float
    decode_tokens_per_s: float


@contextmanager
def alone(server: RunningServer, fleet: Collection[RunningServer]) -> Iterator[None]:
    """Suspend all other servers of a fleet while the block runs: even an idle one takes turns."""
    with ExitStack() as resumed:
        for other in fleet:
            if other is not server:
                other.suspend()
                resumed.callback(other.resume)
        yield


def in_turn(
    fleet: Mapping[str, RunningServer],
    num_rounds: int,
    measure: Callable[[str, int], None],
    names: Sequence[str] | None = None,
) -> None:
    """Measure each server (of ``names``; None: all) alone, in rounds; every second round in reverse order.

    A slow minute of the machine thus affects all servers, and shows as spread over the rounds. ``measure`` is called
    with a server's name and the number of the round, from 1 on.
    """
    chosen = list(fleet) if names is None else list(names)
    for number in range(1, num_rounds + 1):
        for name in chosen if number % 2 else reversed(chosen):
            with alone(fleet[name], fleet.values()):
                measure(name, number)


def parse_gauges(text: str) -> PoolGauges:
    """Read the pool gauges from the text of ``GET /metrics``.

    Raises:
        ValueError: a gauge is missing (the server runs without ``--enable-metrics``).
    """
    found = {name: float(value) for name, value in _GAUGE.findall(text)}
    missing = [name for name in _POOL_GAUGES if name not in found]
    if missing:
        raise ValueError(f"/metrics lacks {', '.join(missing)}; is --enable-metrics set?")
    total, available, evictable, running = (int(found[name]) for name in _POOL_GAUGES)
    return PoolGauges(total=total, available=available, evictable=evictable, running=running)


def idle_gauges(server: RunningServer, timeout_s: float = 30.0) -> PoolGauges:
    """Gauges of the idle server after a short request: SGLang refreshes them when it becomes idle."""
    sampling = {"temperature": 0, "max_new_tokens": _PROBE_TOKENS, "ignore_eos": True}
    server.post("/generate", {"input_ids": list(_PROBE_IDS), "sampling_params": sampling})
    deadline = time.monotonic() + timeout_s
    previous, since = None, time.monotonic()
    while time.monotonic() < deadline:
        gauges = parse_gauges(server.get_text("/metrics"))
        if gauges != previous:
            previous, since = gauges, time.monotonic()
        elif gauges.running == 0 and time.monotonic() - since >= _STABLE_S:
            return gauges
        time.sleep(0.2)
    raise TimeoutError(f"the server did not get idle within {timeout_s:.0f} s: {previous}")


def flush(server: RunningServer) -> None:
    """Empty the cache, once the server is idle."""
    server.post("/flush_cache?timeout=60")


def time_stream(
    server: RunningServer, text: str, max_new_tokens: int, clock: Callable[[], float] = time.perf_counter
) -> StreamTiming:
    """Generate exactly ``max_new_tokens`` greedily and time the stream on the client's side.

    ``clock`` (seconds) is read before the request and as each event arrives.
    """
    body = {
        "text": text,
        "stream": True,
        "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True},
    }
    request = urllib.request.Request(
        f"{server.url}/generate", data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
    )
    arrivals: list[tuple[float, int]] = []
    meta: dict[str, Any] = {}
    started = clock()
    with urllib.request.urlopen(request, timeout=600) as response:
        for line in response:
            if line.startswith(b"data: {"):
                meta = json.loads(line[len(b"data: ") :])["meta_info"]
                arrivals.append((clock(), int(meta["completion_tokens"])))
    first, last = arrivals[0], arrivals[-1]
    tokens, seconds = last[1] - first[1], last[0] - first[0]
    return StreamTiming(
        prompt_tokens=int(meta["prompt_tokens"]),
        cached_tokens=int(meta["cached_tokens"]),
        ttft_s=first[0] - started,
        decode_tokens_per_s=tokens / seconds if tokens else 0.0,
    )


def plugin_state(server: RunningServer) -> dict[str, Any] | None:
    """The plugin's state in ``GET /server_info``, of one scheduler; None on stock SGLang."""
    return next(iter(plugin_states(server)), None)


def plugin_states(server: RunningServer, timeout_s: float = 30.0) -> list[dict[str, Any]]:
    """The plugin's state of each data-parallel scheduler, in no order; [] on stock SGLang."""
    states = server.get_json("/server_info", timeout_s)["internal_states"]
    return [state["kvevict"] for state in states if "kvevict" in state]
