"""``sgl-kvevict learn``: serve a model, have texts scored by passes, and write the learned scores to a file."""

from __future__ import annotations

import itertools
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from sgl_kvevict.cli.server_plan import plan_serve
from sgl_kvevict.client import warm
from sgl_kvevict.config import parse_config
from sgl_kvevict.distill.texts import texts_of_folder, training_texts
from sgl_kvevict.errors import ConfigError, KVEvictError
from sgl_kvevict.launcher import RunningServer, launch
from sgl_kvevict.sglang_adapter.start_checks import output_reasons

LENGTHS = (4000, 8000, 16000, 2000)
"""Characters of a text, in turn: weights learned from short prefixes only have less recall in long ones."""
SPARE_TEXTS = 8
"""Further texts, used if the scores learned from the first ones are not good enough."""

Say = Callable[[str], None]


class LearnError(KVEvictError):
    """The learned scores have too little recall, or were not written."""


def learn(model: str, out: Path, texts: Path | None, num_prefixes: int, sglang_flags: Sequence[str], say: Say) -> None:
    """Learn the scores of a model from texts, as a server learns from users' prefixes, and write them to a file.

    ``texts`` is a folder of text files; None: texts that come with Python. ``say`` receives lines of progress. SIGTERM
    ends the server, too.

    Raises:
        ConfigError: there are too few texts, ``out`` cannot be written, or the server cannot start with these flags.
        LearnError: the learned scores have too little recall of the entries that scoring passes keep.
        LaunchError: the server did not start, or ended.
    """
    if reasons := output_reasons("--out", out):
        raise ConfigError(reasons[0])
    passages = _passages(texts, num_prefixes)
    values = {"score_weights": None, "save_score_weights": str(out.absolute()), "distill_prefixes": num_prefixes}
    plan = plan_serve(model, parse_config(values, "sgl-kvevict learn"), sglang_flags, listens=False)
    flags = plan.command[plan.command.index("--model-path") + 2 :]
    served = plan.command[plan.command.index("--model-path") + 1]
    before = out.stat().st_mtime_ns if out.exists() else None
    started = time.monotonic()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # removes the folder, stops the server
    with tempfile.TemporaryDirectory(prefix="kvevict-learn-") as folder:
        say(f"serving {model} to learn from {num_prefixes} texts, and to try what was learned on another one")
        with launch(served, flags=flags, env=plan.environ, log_path=Path(folder) / "server.log") as server:
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


def _learn_from(server: RunningServer, passage: str, *, as_chat: bool) -> float | None:
    """Have a text scored; return the recall of the learned scores, None until they are in use."""
    server.post("/flush_cache?timeout=60")
    if as_chat:
        warm(server.url, messages=[{"role": "user", "content": passage}])
    else:
        warm(server.url, text=passage)
    learned = server.get_json("/server_info")["internal_states"][0]["kvevict"]["learned_scores"]
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
