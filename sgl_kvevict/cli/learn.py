"""``sgl-kvevict learn``: start a server that learns the scores of a model, and keep the file that it writes."""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from sgl_kvevict.cli.server_plan import plan_serve
from sgl_kvevict.config import parse_config
from sgl_kvevict.distill.files import read_recall
from sgl_kvevict.distill.learner import MIN_RECALL
from sgl_kvevict.distill.texts import passages_of
from sgl_kvevict.errors import ConfigError, KVEvictError
from sgl_kvevict.launcher import launch
from sgl_kvevict.sglang_adapter.start_checks import output_reasons

TIMEOUT_S = 24 * 3600.0
"""Limit for loading the model and learning."""
POLL_SECONDS = 0.5
_MARKS = ("kvevict: learning scores", "kvevict: learned scores")

Say = Callable[[str], None]


class LearnError(KVEvictError):
    """The learned scores have too little recall, or were not written."""


def learn(model: str, out: Path, texts: Path | None, sglang_flags: Sequence[str], say: Say) -> None:
    """Learn the scores of a model as every server does before it is ready, and write them to a file.

    ``texts`` is a folder of text files; None: texts that come with Python. ``say`` receives lines of progress. SIGTERM
    ends the server, too.

    Raises:
        ConfigError: ``out`` cannot be written, the texts are too few, or the server cannot start with these flags.
        LearnError: nothing was learned, or the scores, which are written all the same, have too little recall.
        LaunchError: the server did not start, or ended.
    """
    if reasons := output_reasons("--out", out):
        raise ConfigError(reasons[0])
    if texts is not None:
        passages_of(str(texts))  # refused before anything is started
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # removes the folder, stops the server
    with tempfile.TemporaryDirectory(prefix="kvevict-learn-") as folder:
        learned, log_path = Path(folder) / "scores.safetensors", Path(folder) / "server.log"
        values = {"score_weights": str(learned), "score_texts": None if texts is None else str(texts.absolute())}
        plan = plan_serve(model, parse_config(values, "sgl-kvevict learn"), sglang_flags, listens=False)
        place = plan.command.index("--model-path")
        served, flags = plan.command[place + 1], plan.command[place + 2 :]
        say(f"starting a server of {model} that learns scores before it is ready")
        with (
            _progress(log_path, say),
            launch(served, flags=flags, env=plan.environ, log_path=log_path, timeout_s=TIMEOUT_S) as server,
        ):
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
