"""``sgl-kvevict learn``: serve a model, have texts scored by passes, and write the learned scores to a file."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from sgl_kvevict.cli.server_plan import ServePlan, plan_serve
from sgl_kvevict.client import warm
from sgl_kvevict.config import parse_config
from sgl_kvevict.distill.texts import texts_of_folder, training_texts
from sgl_kvevict.errors import ConfigError, KVEvictError
from sgl_kvevict.sglang_adapter.start_checks import output_reasons

LENGTHS = (4000, 8000, 16000, 2000)
"""Characters of a text, in turn: weights learned from short prefixes only have less recall in long ones."""
SPARE_TEXTS = 8
"""Further texts, used if the scores learned from the first ones are not good enough."""

PORTS = range(20_000, 32_000)
"""Below the ports of outgoing connections, one of which could take it while the server loads its model."""
START_SECONDS = 600.0
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
        self.url = f"http://127.0.0.1:{port}"
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
        deadline = time.monotonic() + START_SECONDS
        try:
            while time.monotonic() < deadline:
                self._check_alive()
                with contextlib.suppress(OSError):  # refused, 503, or too slow yet
                    self.ask("/health")
                    return self
                time.sleep(0.1)
            raise LearnError(f"the server gave no answer within {START_SECONDS:.0f} s\n{self.log_tail()}")
        except BaseException:
            self._stop()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if isinstance(error, OSError):  # a lost connection: did the server end?
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(STOP_SECONDS)
                self._check_alive()
        finally:
            self._stop()

    def ask(self, path: str) -> bytes:
        """The answer to GET."""
        with urllib.request.urlopen(self.url + path, timeout=300) as response:
            return bytes(response.read())

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


def learn(model: str, out: Path, texts: Path | None, num_prefixes: int, sglang_flags: Sequence[str], say: Say) -> None:
    """Learn the scores of a model from texts, as a server learns from users' prefixes, and write them to a file.

    ``texts`` is a folder of text files; None: texts that come with Python. ``say`` receives lines of progress. SIGTERM
    ends the server, too.

    Raises:
        ConfigError: there are too few texts, ``out`` cannot be written, or the server cannot start with these flags.
        LearnError: the server did not start, or ended, or the learned scores have too little recall of the entries that
            scoring passes keep.
    """
    if reasons := output_reasons("--out", out):
        raise ConfigError(reasons[0])
    passages = _passages(texts, num_prefixes)
    values = {"score_weights": None, "save_score_weights": str(out.absolute()), "distill_prefixes": num_prefixes}
    plan = plan_serve(model, parse_config(values, "sgl-kvevict learn"), sglang_flags, listens=False)
    before = out.stat().st_mtime_ns if out.exists() else None
    started = time.monotonic()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # removes the folder, stops the server
    with tempfile.TemporaryDirectory(prefix="kvevict-learn-") as folder:
        say(f"serving {model} to learn from {num_prefixes} texts, and to try what was learned on another one")
        with _Server(plan, Path(folder) / "server.log") as server:
            for number, passage in enumerate(passages, 1):
                recall = _learn_from(server, passage, as_chat=number % 2 == 0)
                say(f"text {number}: {time.monotonic() - started:.0f} s")
                if recall is not None:
                    break
            else:
                raise LearnError(f"{len(passages)} texts were not enough:\n{server.log_tail(12)}")
    if not out.exists() or out.stat().st_mtime_ns == before:
        raise LearnError(f"the server could not write {out}")
    say(f"{out}: learned scores find {recall:.0%} of what passes keep")


def _learn_from(server: _Server, passage: str, *, as_chat: bool) -> float | None:
    """Have a text scored; return the recall of the learned scores, None until they are in use."""
    server.ask("/flush_cache?timeout=60")
    if as_chat:
        warm(server.url, messages=[{"role": "user", "content": passage}])
    else:
        warm(server.url, text=passage)
    info: dict[str, Any] = json.loads(server.ask("/server_info"))
    learned = info["internal_states"][0]["kvevict"]["learned_scores"]
    return learned["recall"] if learned["in_use"] else None


def _passages(texts: Path | None, num_prefixes: int) -> list[str]:
    wanted = num_prefixes + 1 + SPARE_TEXTS
    lengths = list(itertools.islice(itertools.cycle(LENGTHS), wanted))
    if texts is None:
        return training_texts(lengths)
    try:
        found = [passage for passage in texts_of_folder(texts, lengths) if len(passage) >= min(LENGTHS)]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--texts: {texts} cannot be read: {error}") from error
    if len(found) < num_prefixes + 1:
        raise ConfigError(
            f"--texts: got {len(found)} passages of {min(LENGTHS):,} characters or more in {texts}; "
            f"allowed: {num_prefixes + 1} or more (UTF-8 files), or fewer --prefixes"
        )
    return found
