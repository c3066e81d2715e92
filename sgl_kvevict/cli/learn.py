"""``sgl-kvevict learn``: start a server that learns about its model, and keep the file that it writes."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType

from sgl_kvevict.cli.server_plan import ServePlan, plan_serve
from sgl_kvevict.config import parse_config
from sgl_kvevict.distill.files import check_format, read_recall
from sgl_kvevict.distill.learner import MIN_RECALL
from sgl_kvevict.distill.texts import passages_of
from sgl_kvevict.errors import ConfigError, KVEvictError
from sgl_kvevict.sglang_adapter.start_facts import output_error

TIMEOUT_S = 24 * 3600.0
"""Limit for loading the model and learning."""
POLL_SECONDS = 0.5
_MARKS = ("kvevict: learning ", "kvevict: learned ")

PORTS = range(20_000, 32_000)
"""Below the ports of outgoing connections, one of which could take it while the server loads its model."""
STOP_SECONDS = 10.0

Say = Callable[[str], None]


class LearnError(KVEvictError):
    """The server ended, or the learned scores have too little recall, or were not written."""


class _Server:
    """A server in a process group of its own, for a ``with`` block; its output goes to ``log``.

    A shell reads a pipe from this process. The pipe closes however this process ends, and the shell ends the group.
    """

    def __init__(self, plan: ServePlan, log: Path) -> None:
        port = next(port for port in random.sample(PORTS, len(PORTS)) if _is_free(port))
        self._url = f"http://127.0.0.1:{port}"
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [*plan.command, "--host", "127.0.0.1", "--port", str(port)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **plan.environ},
                start_new_session=True,
            )
        watch = ["sh", "-c", 'read -r _; kill -s KILL -- "-$0"', str(self._process.pid)]
        nothing = subprocess.DEVNULL
        self._watcher = subprocess.Popen(watch, stdin=subprocess.PIPE, stderr=nothing, start_new_session=True)

    def __enter__(self) -> _Server:
        deadline = time.monotonic() + TIMEOUT_S
        try:
            while time.monotonic() < deadline:
                self._check_alive()
                with contextlib.suppress(OSError), urllib.request.urlopen(f"{self._url}/health", timeout=300):
                    return self  # an error says: refused, 503, or too slow yet
                time.sleep(0.1)
            raise LearnError(f"the server gave no answer within {TIMEOUT_S:.0f} s\n{self.log_tail()}")
        except BaseException:
            self._stop()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def log_tail(self, num_lines: int = 40) -> str:
        """The last lines of the server's output."""
        return "\n".join(self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-num_lines:])

    def _check_alive(self) -> None:
        if self._process.poll() is not None:
            raise LearnError(f"the server exited with code {self._process.returncode}\n{self.log_tail()}")

    def _stop(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
        self._watcher.kill()
        self._watcher.communicate()


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def learn(
    model: str, out: Path, texts: Path | None, sglang_flags: Sequence[str], say: Say, *, completes: bool = False
) -> None:
    """Learn about a model what every server does before it is ready, and write it to a file: scores and statistics.

    ``texts`` is a folder of text files; None: texts that come with Python. ``say`` receives lines of progress. With
    ``completes``, what the file has is kept, and only the rest is learned. SIGTERM ends the server, too.

    Raises:
        ConfigError: ``out`` cannot be written, or completed; the texts are too few, or the server cannot start with
            these flags.
        LearnError: the server did not start, or ended; nothing was learned, or the scores, which are written all the
            same, have too little recall of the entries that scoring passes keep.
    """
    if (error := output_error(out)) is not None:
        raise ConfigError(f"--out: {str(out)!r} cannot be written ({error}); allowed: a path in a folder")
    if completes:
        check_format(out)
    if texts is not None:
        passages_of(str(texts))  # refused before anything is started
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # removes the folder, stops the server
    with tempfile.TemporaryDirectory(prefix="kvevict-learn-") as folder:
        learned, log_path = Path(folder) / "scores.safetensors", Path(folder) / "server.log"
        if completes:
            shutil.copyfile(out, learned)
        values = {"score_weights": str(learned), "score_texts": None if texts is None else str(texts.absolute())}
        plan = plan_serve(model, parse_config(values, "sgl-kvevict learn"), sglang_flags, listens=False)
        say(f"starting a server of {model} that learns before it is ready")
        with _progress(log_path, say), _Server(plan, log_path) as server:
            if not learned.exists():
                raise LearnError(f"the server learned nothing:\n{server.log_tail(12)}")
        recall = read_recall(learned) or 0.0
        _put(learned, out)
    say(f"{out}: learned scores find {recall:.0%} of what passes keep")
    if recall < MIN_RECALL:
        raise LearnError(f"{out} is written, but {recall:.0%} is less than {MIN_RECALL:.0%}: try other texts (--texts)")


@contextlib.contextmanager
def _progress(log_path: Path, say: Say) -> Iterator[None]:
    """Pass on what a server's log says about learning, as it says it."""
    is_over = threading.Event()

    def follow() -> None:
        position = 0
        while not is_over.wait(POLL_SECONDS):
            text = log_path.read_text(encoding="utf-8", errors="replace") if log_path.exists() else ""
            lines = text[position:].splitlines(keepends=True)
            for line in lines:
                if line.endswith("\n"):
                    position += len(line)
                    if any(mark in line for mark in _MARKS):
                        say(line[line.index("kvevict: ") + len("kvevict: ") :].rstrip())

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _put(learned: Path, out: Path) -> None:
    """Copy a file into place, so that a reader finds all of it or none."""
    scratch = out.with_name(f".{out.name}.learned")
    out.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(learned, scratch)
    scratch.rename(out)
