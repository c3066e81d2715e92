"""Starts an SGLang server as a child process, and ends all its processes however the starting process ends.

Used by the demo, the tests and the benchmarks. Standard library only, for a fast import.
``python -m kvevict_tools.launcher PARENT GROUP`` is the watcher of one server.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol

from sgl_kvevict.errors import KVEvictError
from sgl_kvevict.machine import has_fast_bfloat16

#: Environment of every server on a CPU: our platform plugin, local models, and OpenMP threads that spin for
#: microseconds before they sleep. Without spinning, every operation of a decode step pays for waking them; with the
#: default (milliseconds), they take cores from SGLang's other processes.
CPU_ENV: Mapping[str, str] = {
    "SGLANG_PLATFORM": "kvevict_cpu",
    "HF_HUB_OFFLINE": "1",
    "GOMP_SPINCOUNT": "10000",
}
#: SGLang's own leak checks: raise (and so end the server) when idle and between any two batches.
STRICT_CHECK_ENV: Mapping[str, str] = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
}
#: Where bfloat16 products are slow: compute in float32, keep K and V in 16 bits, as on every other machine.
SLOW_BFLOAT16_FLAGS: Sequence[str] = ("--dtype", "float32", "--kv-cache-dtype", "bfloat16")
#: Device and dtypes of every server on a CPU; the model's own dtype if bfloat16 is fast. Later flags win.
CPU_FLAGS: Sequence[str] = ("--device", "cpu", *(() if has_fast_bfloat16() else SLOW_BFLOAT16_FLAGS))
#: Model and KV pool in float32 on every machine, for servers whose answers are compared token by token.
FLOAT32_FLAGS: Sequence[str] = ("--dtype", "float32", "--kv-cache-dtype", "auto")
#: Stock SGLang on a CPU: its default radix cache and its plain torch attention.
STOCK_CPU_FLAGS: Sequence[str] = (*CPU_FLAGS, "--attention-backend", "torch_native")
#: SGLang with this plugin on a CPU. The configuration travels in ``config_env``.
KVEVICT_CPU_FLAGS: Sequence[str] = (
    *CPU_FLAGS,
    *("--radix-cache-backend", "kvevict", "--attention-backend", "kvevict"),
)

# Below those from which SGLang takes ports of its own, 22,000 on; it derives more, up to 240 above a server's.
_PORTS = range(10_000, 21_700)
_ports_given: set[int] = set()
_LOG_TAIL_LINES = 40
#: Seconds to wait after a failure for the server to end: SGLang's main process outlives a failed child.
_DEATH_SETTLE_S = 10.0
_LEAK_MARKS = ("memory leak detected", "mem leak detected", "kv double free")


class LaunchError(KVEvictError, RuntimeError):
    """A server did not start, or ended; the message ends with the tail of its log."""


def config_env(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment variable that carries ``config`` (fields of ``KVEvictConfig``) to the server."""
    return {"KVEVICT_CONFIG": json.dumps(dict(config))}


@dataclass(frozen=True)
class System:
    """A server to start: name for tables, command line flags, added environment variables."""

    name: str
    flags: Sequence[str]
    env: Mapping[str, str]


def stock_system(name: str, flags: Sequence[str] = (), env: Mapping[str, str] | None = None) -> System:
    """Stock SGLang on a CPU with its radix cache; ``flags`` and ``env`` are added to those of every server."""
    return System(name, (*STOCK_CPU_FLAGS, *flags), {**CPU_ENV, **(env or {})})


def kvevict_system(
    name: str, config: Mapping[str, Any], flags: Sequence[str] = (), env: Mapping[str, str] | None = None
) -> System:
    """SGLang with this plugin on a CPU, configured by ``config``; otherwise the same as ``stock_system``."""
    return System(name, (*KVEVICT_CPU_FLAGS, *flags), {**CPU_ENV, **(env or {}), **config_env(config)})


def free_port() -> int:
    """Return a TCP port that nothing listens on, a different one at each call.

    It lies below the ports of outgoing connections, one of which could take it while the server loads its model.
    """
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        if port not in _ports_given and _can_bind(port):
            _ports_given.add(port)
            return port
    raise LaunchError(f"no free TCP port from {_PORTS.start} to {_PORTS.stop - 1}")


def _can_bind(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


class ServerProcess(Protocol):
    """The first process of a server, leader of its group: what is used of :class:`subprocess.Popen`."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None:
        """The exit code; None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once there is one; ``subprocess.TimeoutExpired`` after ``timeout`` s."""

    def terminate(self) -> None:
        """Send it SIGTERM."""


class RunningServer:
    """A server started by ``launch``; the end of the ``with`` block, or the interpreter's exit, stops it.

    If this process is killed, a watcher process ends the server's process group, whose leader is ``process``. A
    ``with`` block that fails because the server died raises ``LaunchError`` with the tail of the log.
    """

    def __init__(self, process: ServerProcess, url: str, log_path: Path) -> None:
        self.process = process
        self.url = url
        self.log_path = log_path
        self._watcher = start_watcher(process.pid)
        atexit.register(self.stop)

    def __enter__(self) -> RunningServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if isinstance(error, Exception):
                self.check_alive(settle_s=_DEATH_SETTLE_S)
        finally:
            self.stop()

    @property
    def alive(self) -> bool:
        """Whether the main server process still runs."""
        return self.process.poll() is None

    def log(self) -> str:
        """All output until now (stdout and stderr); empty if it goes to a device."""
        if not self.log_path.is_file():
            return ""
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def log_tail(self, lines: int = _LOG_TAIL_LINES) -> str:
        """The last ``lines`` lines of the log."""
        return "\n".join(self.log().splitlines()[-lines:])

    def leak_messages(self) -> list[str]:
        """Log lines of SGLang's own memory checker that report a leak."""
        return [line for line in self.log().splitlines() if any(m in line.lower() for m in _LEAK_MARKS)]

    def check_alive(self, settle_s: float = 0.0) -> None:
        """Raise ``LaunchError`` with the tail of the log if the server has ended, or ends within ``settle_s``."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(settle_s)
        if not self.alive:
            raise LaunchError(f"server exited with code {self.process.returncode}\n{self.log_tail()}")

    def get_json(self, path: str, timeout_s: float = 30.0) -> Any:
        """GET ``path`` (starts with a slash) and decode its JSON body."""
        return json.loads(self.get_text(path, timeout_s))

    def get_text(self, path: str, timeout_s: float = 30.0) -> str:
        """GET ``path`` and return its body as text."""
        with urllib.request.urlopen(self.url + path, timeout=timeout_s) as response:
            return str(response.read().decode("utf-8"))

    def post(self, path: str, body: Mapping[str, Any] | None = None, timeout_s: float = 300.0) -> bytes:
        """POST a JSON ``body`` and return the raw answer; an error status raises ``urllib.error.HTTPError``."""
        data = json.dumps(dict(body or {})).encode()
        request = urllib.request.Request(
            self.url + path, data=data, headers={"Content-Type": "application/json"}, method="POST"
        )
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return bytes(response.read())

    def suspend(self) -> None:
        """Suspend every process of the server (SIGSTOP) until :meth:`resume`; requests wait."""
        os.killpg(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Continue a suspended server."""
        os.killpg(self.process.pid, signal.SIGCONT)

    def stop(self, grace_s: float = 10.0) -> None:
        """End the server's process group, suspended or not (see :func:`end_group`). Safe to call twice."""
        atexit.unregister(self.stop)
        # `poll` reaps the leader: its zombie would keep the group alive.
        end_group(self.process.pid, grace_s, self.process.poll)
        self._watcher.kill()
        self._watcher.wait()


def spawn_process(command: Sequence[str], env: Mapping[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    """Run a command in a session of its own, with variables added to the environment, stdout and stderr to ``log``."""
    return subprocess.Popen(
        command,
        stdout=log,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **env},
        start_new_session=True,
    )


def launch(
    model: str | Path,
    *,
    flags: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    log_path: str | Path,
    timeout_s: float = 400.0,
    spawn: Callable[[Sequence[str], Mapping[str, str], IO[bytes]], ServerProcess] = spawn_process,
) -> RunningServer:
    """Start ``sglang.launch_server`` on a free port and wait until it answers a generation.

    Args:
        model: model folder or hub name.
        flags: further command line flags; ``--host``, ``--port`` and ``--model-path`` are set here.
        env: variables added to this process's environment, e.g. ``CPU_ENV | config_env({...})``.
        log_path: file that receives stdout and stderr; its folder is created, an old file replaced.
        timeout_s: limit for the start (seconds).
        spawn: starts a command that leads a process group, from the command, added variables and its log.

    Raises:
        LaunchError: it exited or did not answer in time.
    """
    port = free_port()
    path = Path(log_path)
    path.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), *flags]
    with path.open("wb") as log_file:
        process = spawn(command, env or {}, log_file)
    server = RunningServer(process, f"http://127.0.0.1:{port}", path)
    try:
        _wait_until_healthy(server, timeout_s)
    except BaseException:
        server.stop()
        raise
    return server


@contextlib.contextmanager
def launch_all(
    model: str | Path, systems: Sequence[System], *, log_folder: Path, timeout_s: float = 400.0
) -> Iterator[dict[str, RunningServer]]:
    """Start all systems, two at a time, yield the servers by name, and stop them at the end.

    Raises:
        LaunchError: one did not start, or has ended before the end.
    """
    with contextlib.ExitStack() as stack:

        def start(system: System) -> RunningServer:
            log_path = log_folder / f"{system.name.replace(' ', '-')}.log"
            server = launch(model, flags=system.flags, env=system.env, log_path=log_path, timeout_s=timeout_s)
            return stack.enter_context(server)

        with ThreadPoolExecutor(2) as pool:
            servers = list(pool.map(start, systems))
        yield {system.name: server for system, server in zip(systems, servers, strict=True)}
        for server in servers:
            server.check_alive()


def _wait_until_healthy(server: RunningServer, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        server.check_alive()
        with contextlib.suppress(OSError):  # refused, reset, 503 (HTTPError is an OSError) or too slow yet
            server.get_text("/health", timeout_s=30.0)
            return
        time.sleep(0.1)
    raise LaunchError(f"server gave no answer within {timeout_s:.0f} s\n{server.log_tail()}")


def end_group(group: int, grace_s: float = 10.0, reap: Callable[[], object] = lambda: None) -> None:
    """End a process group by the id of its leader: SIGTERM, then SIGKILL after ``grace_s`` s; returns when it is gone.

    ``reap`` is called before each look at the group, to reap ended processes if the caller is their parent.
    """
    for signal_number, patience_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 10.0)):
        deadline = time.monotonic() + patience_s
        _signal_group(group, signal_number)
        _signal_group(group, signal.SIGCONT)
        while time.monotonic() < deadline:
            reap()
            if _has_ended(group):
                return
            time.sleep(0.05)


def _has_ended(group: int) -> bool:
    """Whether no process of the group runs. Zombies count as ended: some containers' init reaps late, or never."""
    if not _signal_group(group, 0):
        return True
    states = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # a process that ended meanwhile
            state, _, its_group, *_ = path.read_text().rsplit(")", 1)[1].split()
            if int(its_group) == group:
                states.add(state)
    return states == {"Z"}


def _signal_group(group: int, signal_number: int) -> bool:
    """Send a signal to a process group; return whether the group exists."""
    try:
        os.killpg(group, signal_number)
    except ProcessLookupError:
        return False
    return True


def start_watcher(group: int) -> subprocess.Popen[bytes]:
    """Start a process that ends a process group as soon as this process is gone; it ends with the group.

    In its own session, signals to this process's group (Ctrl-C) and the server's suspension do not reach it.
    ``PR_SET_PDEATHSIG`` is no alternative: it follows the starting *thread* and does not reach grandchildren.
    """
    command = [sys.executable, "-m", __name__, str(os.getpid()), str(group)]
    nothing = subprocess.DEVNULL
    return subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True)


def _watch(parent: int, group: int) -> None:
    """Wait until ``parent`` is no longer this process's parent, then end ``group``."""
    while os.getppid() == parent:
        if not _signal_group(group, 0):
            return
        time.sleep(0.2)
    end_group(group)


if __name__ == "__main__":
    _watch(int(sys.argv[1]), int(sys.argv[2]))
