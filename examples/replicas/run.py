"""Replicas of one model, SGLang's gateway before them, and one store of prefixes behind them; Ctrl-C ends all of it.

    pip install smg
    python examples/replicas/run.py --model demo --store /var/cache/kvevict
    curl http://127.0.0.1:30000/v1/chat/completions ...

What one replica has compressed all of them find. One that dies is started again, and finds its prefixes in the store.
What follows ``--`` is passed to every replica's SGLang.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import BinaryIO

BIN = Path(sys.executable).parent
START_S = 600.0
STOP_S = 30.0
WATCHERS: list[subprocess.Popen[bytes]] = []


class Replica:
    """One server and its successors on one port.

    Args:
        command: starts it.
        url: where it answers.
        log: file that it writes to.
    """

    def __init__(self, command: Sequence[str], url: str, log: Path) -> None:
        self._command = command
        self.url = url
        self._log = log
        self.process = self._start()

    def is_ready(self) -> bool:
        """Whether it answers."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def revive(self) -> None:
        """Start it again if it is gone."""
        if self.process.poll() is not None:
            end_group(self.process)  # what it left behind
            print(f"{self.url} ended with code {self.process.returncode} and is started again", flush=True)
            self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return start(self._command, log)


def start(command: Sequence[str], log: BinaryIO) -> subprocess.Popen[bytes]:
    """Start a process in a group of its own, which ends with this process even if this one is killed."""
    process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    watch = ["sh", "-c", 'read -r _; kill -s KILL -- "-$0"', str(process.pid)]  # the pipe closes when this process ends
    WATCHERS.append(subprocess.Popen(watch, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True))
    return process


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def replicas(options: argparse.Namespace, logs: Path) -> list[Replica]:
    """Start the replicas."""
    config = logs / "config.json"
    given = {} if options.config is None else json.loads(options.config)
    config.write_text(json.dumps({**given, "store": options.store}))
    started = []
    for number in range(options.replicas):
        port = options.port + 1 + number
        command = [str(BIN / "sgl-kvevict"), "serve", options.model, "--config", str(config), "--", *options.flags]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        started.append(Replica(command, f"http://127.0.0.1:{port}", logs / f"replica-{number}.log"))
    return started


def gateway(options: argparse.Namespace, servers: Sequence[Replica], logs: Path) -> subprocess.Popen[bytes]:
    """Start the gateway: by cache affinity, asking every other second which replicas live."""
    smg = shutil.which("smg", path=os.pathsep.join([str(BIN), os.environ["PATH"]])) or "smg"
    command = [smg, "launch", "--host", "127.0.0.1", "--port", str(options.port)]
    command += ["--worker-urls", *(server.url for server in servers), "--policy", "cache_aware"]
    command += ["--health-check-interval-secs", "2", "--health-check-timeout-secs", "10"]
    command += ["--health-failure-threshold", "1", "--health-success-threshold", "1"]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(options.port + 1 + options.replicas)]
    with (logs / "gateway.log").open("wb") as log:
        return start(command, log)


def healthy_workers(url: str) -> int:
    """How many replicas the gateway sends requests to: it takes them in some time after it answers itself."""
    try:
        with urllib.request.urlopen(f"{url}/workers", timeout=5) as response:
            workers = json.loads(response.read())["workers"]
    except (urllib.error.URLError, OSError):
        return 0
    return sum(bool(worker["is_healthy"]) for worker in workers)


def wait_for(servers: Sequence[Replica]) -> None:
    """Until all replicas answer.

    Raises:
        RuntimeError: one ended, or they take too long.
    """
    deadline = time.monotonic() + START_S
    for server in servers:
        while not server.is_ready():
            if server.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{server.url} did not start; see its log")
            time.sleep(0.5)


def stop(servers: Sequence[Replica]) -> None:
    """Ask the replicas to leave, so that they write what waits for the store; then end what is left."""
    for server in servers:
        server.process.terminate()
    deadline = time.monotonic() + STOP_S
    for server in servers:
        try:
            server.process.wait(max(deadline - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            print(f"{server.url} did not leave within {STOP_S:.0f} s", flush=True)
        end_group(server.process)


def on_signal(number: int, _frame: FrameType | None) -> None:
    """SIGTERM ends this as Ctrl-C does."""
    raise KeyboardInterrupt(number)


def main() -> None:
    """Start everything, and keep it running."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="folder or hub name, or 'demo'")
    parser.add_argument("--store", required=True, help="folder or URL that all replicas reach")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--port", type=int, default=30000, help="the gateway's; the replicas take the ports after it")
    parser.add_argument("--config", help="further fields of the configuration, a JSON object")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()) / "kvevict-replicas")
    parser.add_argument("flags", nargs="*", help="SGLang's flags, after --")
    options = parser.parse_args()
    options.logs.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, on_signal)
    servers = replicas(options, options.logs)
    front = None
    try:
        wait_for(servers)
        front = gateway(options, servers, options.logs)
        address = f"http://127.0.0.1:{options.port}"
        while front.poll() is None and healthy_workers(address) < len(servers):
            time.sleep(0.2)
        names = ", ".join(server.url for server in servers)
        print(f"gateway {address}; replicas {names}; logs in {options.logs}", flush=True)
        while front.poll() is None:
            for server in servers:
                server.revive()
            time.sleep(0.5)
        print(f"the gateway ended with code {front.returncode}", flush=True)
    except KeyboardInterrupt:
        print("stopping", flush=True)
    finally:
        if front is not None:
            end_group(front)
        stop(servers)


if __name__ == "__main__":
    main()
