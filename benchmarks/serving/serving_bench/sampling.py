"""Where a server's scheduler spends its time: samples of its Python stack, sorted by what they work on."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import psutil

from sgl_kvevict.launcher import RunningServer

RATE_HZ = 25
"""Low, because reading the stacks takes time of the cores that the server computes on."""
WAITING = "waiting for requests"
OTHER = "scheduler, sampling, tokens out"
#: First match wins: the name of a cost, and what one frame of the stack contains where that cost arises.
COSTS = (
    ("compression", ("sgl_kvevict/compression/", "sgl_kvevict/policies/", "sgl_kvevict/prefix/")),
    ("linear layers", ("UnquantizedLinearMethod.apply", "LogitsProcessor.forward")),
    ("attention", ("RadixAttention.forward",)),
    ("attention: plan of the step", ("init_forward_metadata",)),
    ("norms, activations, rotary embedding", ("CausalLM.forward",)),
    (WAITING, ("recv_requests", "maybe_sleep_on_idle")),
)
Phase = Literal["prefill", "decode"]
_OTHER_FORWARDS: dict[Phase, str] = {"prefill": "_execute_decode", "decode": "_execute_extend"}
_STARTS_S = 2.0
"""py-spy needs about a second to read the process."""


def cost_of(stack: str, phase: Phase) -> str | None:
    """What a stack works on; None for threads other than the scheduler's, and for forwards of the other phase.

    Args:
        stack: frames from the outermost to the innermost, as py-spy writes them: ``"name (file:line);..."``.
        phase: which forwards count.
    """
    if "event_loop" not in stack or _OTHER_FORWARDS[phase] in stack:
        return None
    for cost, marks in COSTS:
        if any(mark in stack for mark in marks):
            return cost
    return OTHER


def count_costs(lines: Iterable[str], phase: Phase) -> Counter[str]:
    """Samples per cost.

    Args:
        lines: ``"stack number-of-samples"``, py-spy's format ``raw``.
        phase: which forwards count.
    """
    counts: Counter[str] = Counter()
    for line in lines:
        stack, _, samples = line.rpartition(" ")
        if (cost := cost_of(stack, phase)) is not None:
            counts[cost] += int(samples)
    return counts


@contextmanager
def sampled(server: RunningServer, phase: Phase) -> Iterator[Counter[str]]:
    """Sample the server's scheduler while the block runs; the counter of samples is filled at its end."""
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stacks"
        command = [str(Path(sys.executable).parent / "py-spy"), "record", "--idle", "--nonblocking", "--format", "raw"]
        command += ["--rate", str(RATE_HZ), "--duration", "600", "--output", str(path), "--pid", str(scheduler(server))]
        profiler = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        time.sleep(_STARTS_S)
        try:
            yield counts
        finally:
            profiler.send_signal(signal.SIGINT)
            output, _ = profiler.communicate(timeout=60)
        if not path.exists():
            raise RuntimeError(f"py-spy wrote nothing: {output}")
        counts.update(count_costs(path.read_text(encoding="utf-8").splitlines(), phase))


def scheduler(server: RunningServer) -> int:
    """Process id of the server's scheduler."""
    children = psutil.Process(server.process.pid).children(recursive=True)
    found = [child.pid for child in children if "scheduler" in " ".join([child.name(), *child.cmdline()])]
    if len(found) != 1:
        raise RuntimeError(f"expected one scheduler among {[child.name() for child in children]}, found {len(found)}")
    return found[0]
