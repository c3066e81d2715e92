"""Real services that stores are kept in, started for a test and stopped after it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from kvevict_tools.launcher import free_port

START_S = 300.0


@contextmanager
def process(command: Sequence[str], log: Path, ready: Callable[[], bool]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command until the block ends; enter it once it is ready."""
    with log.open("wb") as out:
        child = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
    try:
        deadline = time.monotonic() + START_S
        while not ready():
            assert child.poll() is None and time.monotonic() < deadline, log.read_text(errors="replace")[-2000:]
            time.sleep(0.1)
        yield child
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def answers(port: int) -> bool:
    """Whether somebody listens on a port of this machine."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def s3_server(folder: Path) -> Iterator[str]:
    """moto's S3 server; its address."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with process(command, folder / "s3.log", lambda: answers(port)):
        yield f"http://127.0.0.1:{port}"


class Mooncake:
    """A master and a process that gives memory.

    Attributes:
        url: of a store in it.
    """

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self._port, self._listing = free_port(), free_port()
        self.url = f"mooncake://127.0.0.1:{self._port}/kvevict?listing_port={self._listing}&buffer_bytes=33554432"

    def start(self) -> None:
        """Start both."""
        master = ["mooncake_master", "-port", str(self._port), "-metrics_port", str(self._listing)]
        master += ["-rpc_address", "127.0.0.1"]
        self._master = self._stack.enter_context(process(master, self._folder / "master.log", self._listens))
        client = ["mooncake_client", "-master_server_address", f"127.0.0.1:{self._port}"]
        client += ["-metadata_server", "P2PHANDSHAKE", "-host", "127.0.0.1", "-protocol", "tcp"]
        client += ["-port", str(free_port()), "-global_segment_size", "256MB"]
        self._stack.enter_context(process(client, self._folder / "client.log", self._has_memory))

    def stop_master(self) -> None:
        """The master dies."""
        self._master.kill()
        self._master.wait()

    def _listens(self) -> bool:
        return answers(self._port) and answers(self._listing)

    def _has_memory(self) -> bool:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._listing}/metrics", timeout=5) as response:
            lines = response.read().decode().splitlines()
        total = [line.split()[-1] for line in lines if line.startswith("master_total_capacity_bytes ")]
        return bool(total) and float(total[0]) > 0
