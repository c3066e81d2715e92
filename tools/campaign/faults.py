"""Things that go wrong around a server: it goes on, or ends cleanly, and serves nothing wrong when it is back."""

from __future__ import annotations

import os
import random
import resource
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from campaign.parts import Counts
from campaign.servers import Clock, error_lines, events, processes, server

from helpers.modes import CONFIG, assert_nothing_leaked, serve_readers
from helpers.tiny_model import VOCAB_SIZE
from helpers.traffic import generate
from kvevict_tools.launcher import LaunchError, RunningServer
from kvevict_tools.measure import plugin_state


def unit(seed: int, share: float) -> Counts:
    """One thing that goes wrong."""
    fault = FAULTS[seed % len(FAULTS)]
    fault(seed, share)
    return {"done": 1, fault.__name__[1:].replace("_", " "): 1}


def _traffic(running: RunningServer, count: float, seed: int) -> None:
    serve_readers(running, max(int(count), 12), seed=seed, priorities=False)


@contextmanager
def _served_alike_after() -> Iterator[list[RunningServer]]:
    """Run a server; another one after it, started when the block has ended it, gives the same answers."""
    rng = random.Random(7)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(40)] for _ in range(4)]
    with server(config=CONFIG) as running:
        before = [generate(running, prompt, 8)["output_ids"] for prompt in prompts]
        yield [running]
        for _ in range(1800):  # SGLang looks for the cause for a minute
            if not running.alive:
                break
            time.sleep(0.1)
        assert not running.alive, "the server did not end"
    with server(config=CONFIG) as again:
        assert plugin_state(again)["spans"] == 0
        assert [generate(again, prompt, 8)["output_ids"] for prompt in prompts] == before
        _traffic(again, 12, 0)
        assert_nothing_leaked(again)


def _a_subscriber_that_never_reads(seed: int, share: float) -> None:
    import msgspec
    import zmq

    addresses = events()
    with server(config={**CONFIG, "events": addresses}) as running, zmq.Context() as context:
        deaf = context.socket(zmq.DEALER)
        deaf.setsockopt(zmq.RCVHWM, 1)
        deaf.setsockopt(zmq.LINGER, 0)
        deaf.connect(addresses["endpoint"])
        for number in range(4):
            deaf.send_multipart([b"", msgspec.msgpack.encode({"op": "status", "follow": True})])
            _traffic(running, 50 * share, 10 * seed + number)
        assert_nothing_leaked(running)
        deaf.close()


def _a_port_that_is_taken(seed: int, share: float) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        taken = f"tcp://127.0.0.1:{holder.getsockname()[1]}"
        try:
            with server(config={**CONFIG, "events": {"endpoint": taken}}):
                raise AssertionError("started on a port that is taken")
        except LaunchError as error:
            assert "cannot be bound" in str(error)


def _a_detokenizer_that_is_killed(seed: int, share: float) -> None:
    with _served_alike_after() as (running,):
        _traffic(running, 50 * share, seed)
        (victim,) = (pid for pid in processes(running) if b"detokenizer" in Path(f"/proc/{pid}/cmdline").read_bytes())
        os.kill(victim, signal.SIGKILL)


def _a_full_disk_of_the_log(seed: int, share: float) -> None:
    """No file grows any more: writes fail, as on a full disk (a server does not start on one)."""
    with server(config=CONFIG) as running:
        _traffic(running, 20 * share, seed)
        for pid in processes(running):
            hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (running.log_path.stat().st_size, hard))
        size = len(running.log())
        _traffic(running, 100 * share, seed + 1)
        assert_nothing_leaked(running)
        assert len(running.log()) < size + 10_000


def _a_clock_that_is_set_back(seed: int, share: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        clock = Clock(Path(folder) / "clock")
        with server(config={**CONFIG, "events": events()}, env=clock.env) as running, ThreadPoolExecutor(1) as pool:
            for number, hours in enumerate((0, -1, -30, 24)):
                traffic = pool.submit(_traffic, running, 60 * share, 10 * seed + number)
                time.sleep(0.5)
                clock.set(3600.0 * hours)
                traffic.result()
            assert assert_nothing_leaked(running) > 0 and not error_lines(running)


def _sigterm_in_the_middle_of_traffic(seed: int, share: float) -> None:
    """SGLang answers what it has taken in before it ends; who comes later is turned away."""
    with _served_alike_after() as (running,), ThreadPoolExecutor(1) as pool:
        traffic = pool.submit(_traffic, running, 200 * share, seed)
        while not plugin_state(running)["compressions"]:
            time.sleep(0.01)
        running.process.terminate()
        assert running.process.wait(240) == 0
        assert not error_lines(running)
        assert traffic.exception() is None or isinstance(traffic.exception(), OSError)


FAULTS = (
    _a_subscriber_that_never_reads,
    _a_port_that_is_taken,
    _a_detokenizer_that_is_killed,
    _a_full_disk_of_the_log,
    _a_clock_that_is_set_back,
    _sigterm_in_the_middle_of_traffic,
)
