"""Servers forked from a process that has imported SGLang and loaded its plugins.

Without it, a server of a tiny model needs 27 s of CPU time to start, because each of its three processes imports
everything; with it 1 s. Forked servers run the same command (``sglang.launch_server``), and fork their own processes,
which SGLang spawns. ``tests/e2e/test_startup.py`` and others start servers as users do.
"""

from __future__ import annotations

import gc
import importlib
import json
import multiprocessing
import os
import runpy
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

TESTS = Path(__file__).resolve().parents[1]
PATCH = "KVEVICT_TEST_PATCH"
"""Variable that names a module which a server imports first."""
MODULES = (
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.models.registry",
    "sgl_kvevict.sglang_adapter.attention_backend",
)
#: Variables that SGLang reads when it is imported: the module and the constant that has the value.
READ_AT_IMPORT = {
    "SGLANG_TEST_RETRACT": ("sglang.srt.managers.scheduler", "TEST_RETRACT"),
    "SGLANG_TEST_RETRACT_INTERVAL": ("sglang.srt.managers.scheduler", "TEST_RETRACT_INTERVAL"),
    "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": ("sglang.srt.managers.schedule_policy", "CLIP_MAX_NEW_TOKENS"),
}


class ForkedServer:
    """The first process of a server; what :class:`kvevict_tools.launcher.RunningServer` needs of ``Popen``."""

    def __init__(self, pid: int, parent: Preloaded) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._parent = parent
        self._ended = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        if self.returncode is None and select.select([self._ended], [], [], 0)[0]:
            self.returncode = self._parent.ask(reap=self.pid)
            os.close(self._ended)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once there is one.

        Raises:
            subprocess.TimeoutExpired: it still runs after ``timeout`` s.
        """
        if self.returncode is None and not select.select([self._ended], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("sglang.launch_server", timeout or 0.0)
        code = self.poll()
        assert code is not None
        return code

    def terminate(self) -> None:
        """Send SIGTERM to the first process only."""
        os.kill(self.pid, signal.SIGTERM)


class Preloaded:
    """A process with SGLang's modules, imported in an environment that all servers share."""

    def __init__(self, env: Mapping[str, str]) -> None:
        paths = [env.get("PYTHONPATH", ""), str(TESTS), os.environ.get("PYTHONPATH", "")]
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "helpers.preloaded"],
            env={**os.environ, **env, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def start(self, command: Sequence[str], env: Mapping[str, str], log: IO[bytes]) -> ForkedServer:
        """Fork a server.

        Args:
            command: interpreter, ``-m``, module and its arguments.
            env: added to the environment; ``PYTHONPATH`` also to ``sys.path``.
            log: receives its output.
        """
        return ForkedServer(self.ask(command=[*command], env=dict(env), log=log.name), self)

    def ask(self, **order: Any) -> int:
        """Have an order done; return the process id, or the exit code of one that ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        """End the process; its servers have ended."""
        self._process.communicate()


def prepare() -> None:
    """Import SGLang and its plugins, and have it fork where it spawns; for a process that has no threads yet."""
    for module in MODULES:
        importlib.import_module(module)
    importlib.import_module("sglang.srt.plugins").load_plugins()  # hooks look for what they replace in all modules
    multiprocessing.set_start_method("fork")
    multiprocessing.set_start_method = lambda method, force=False: None


def main() -> None:
    """Fork servers and reap them, by orders on stdin."""
    prepare()
    gc.freeze()
    while line := sys.stdin.readline():
        order = json.loads(line)
        if pid := order.get("reap"):
            answer = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        elif not (answer := os.fork()):
            serve(**order)
            return
        else:
            os.setpgid(answer, answer)  # before anybody knows its id
        print(answer, flush=True)


def serve(command: Sequence[str], env: Mapping[str, str], log: str) -> None:
    """Run a module in a group of its own, connected to nothing of its parent."""
    os.setpgid(0, 0)
    for path, flags, number in ((os.devnull, os.O_RDONLY, 0), (log, os.O_WRONLY | os.O_APPEND, 1)):
        opened = os.open(path, flags)
        os.dup2(opened, number)
        os.close(opened)
    os.dup2(1, 2)
    os.environ.update(env)
    sys.path[:0] = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    if num_threads := env.get("OMP_NUM_THREADS"):  # OpenMP has read it before the fork
        importlib.import_module("torch").set_num_threads(int(num_threads))
    for name in READ_AT_IMPORT.keys() & env.keys():
        module_name, constant = READ_AT_IMPORT[name]
        module = importlib.import_module(module_name)
        assert hasattr(module, constant)
        setattr(module, constant, getattr(importlib.import_module("sglang.srt.environ").envs, name).get())
    if patch := env.get(PATCH):
        importlib.import_module(patch)
    _, _, main_module, *sys.argv[1:] = command
    runpy.run_module(main_module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
