"""What one tenant's many questions cost the others: the time of their one-token answers, with and without."""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
import urllib.error
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

from campaign.parts import Counts

from helpers.e2e_env import ENV
from kvevict_tools.launcher import KVEVICT_CPU_FLAGS, RunningServer, config_env, launch
from kvevict_tools.models import ensure_model
from sgl_kvevict.client import warm

OTHERS = 2
SENTENCES = 100
"""Of the prefix that the questions are for: about 1,000 tokens."""
QUESTIONS = [f"What does the text say about number {i}, and why?" for i in range(32)]
"""As many as a request may have by default; each has a pass."""
TEXTS = 100
"""Of one client, over and over: all of them fit the pool beside the prefix, which would be dropped otherwise."""
REFUSED = ["0123456789" * 4] * 2000
"""What once held a server for seconds."""


def unit(seed: int, share: float) -> Counts:
    """One server with the demo model; others ask all the time, alone at first, then beside warms with questions."""
    config = {"policy": "reconstruction"}
    with tempfile.TemporaryDirectory() as folder:
        log, flags = Path(folder) / "server.log", [*KVEVICT_CPU_FLAGS, "--max-total-tokens", "16000"]
        with launch(ensure_model(), flags=flags, env=ENV | config_env(config), log_path=log) as running:
            prefix = " ".join(f"Number {seed} {i} is {i * i % 97}." for i in range(SENTENCES))
            _post(running, prefix)  # a long prompt takes its time on any server: not what is measured here
            _latencies(running, lambda: time.sleep(5 * share), seed)  # the first ones compile and load
            alone = _latencies(running, lambda: time.sleep(40 * share), seed + 1)
            questions = QUESTIONS[: max(int(len(QUESTIONS) * share), 2)]
            beside = _latencies(running, lambda: _ask_much(running, prefix, questions), seed + 2)
    return {
        "done": 1,
        **_summary("alone", alone),
        **_summary(f"beside {len(questions)} questions", beside),
    }


def _summary(name: str, seconds: list[float]) -> dict[str, float]:
    return {
        f"largest latency {name} (ms)": 1e3 * max(seconds),
        f"largest median of latencies {name} (ms)": 1e3 * statistics.median(seconds),
        f"answers {name}": len(seconds),
    }


def _post(running: RunningServer, text: str) -> None:
    running.post("/generate", {"text": text, "sampling_params": {"temperature": 0, "max_new_tokens": 1}})


def _ask_much(running: RunningServer, prefix: str, questions: list[str]) -> None:
    """What is allowed is done; what is not is refused at once, again and again."""
    with ThreadPoolExecutor(1) as pool:
        warmed = pool.submit(warm, running.url, text=prefix, questions=questions)
        while not warmed.done():
            _is_refused(running)
            time.sleep(0.5)
        assert warmed.result().outcome in ("compressed", "in-use"), warmed.result()


def _is_refused(running: RunningServer) -> None:
    custom_params = {"kvevict": {"warm": True, "questions": REFUSED}}
    try:
        running.post("/generate", {"text": "a", "sampling_params": {"custom_params": custom_params}})
    except urllib.error.HTTPError as error:
        assert error.code == 400 and b"max_questions" in error.read()
    else:
        raise AssertionError("2,000 questions were accepted")


def _latencies(running: RunningServer, meanwhile: Callable[[], Any], seed: int) -> list[float]:
    """Seconds of the one-token answers of a few others, while something else happens."""
    over, seconds = threading.Event(), []

    def other(number: int) -> None:
        for i in count():
            if over.is_set():
                return
            begin = time.perf_counter()
            _post(running, f"Client {number} of {seed} says {i % TEXTS}: one, two, three,")
            seconds.append(time.perf_counter() - begin)

    with ThreadPoolExecutor(OTHERS) as pool:
        others = [pool.submit(other, number) for number in range(OTHERS)]
        try:
            meanwhile()
        finally:
            over.set()
        for each in others:
            each.result()
    return seconds
