"""Pauses, aborts, flushes and new weights in random orders on real servers, in the middle of requests."""

from __future__ import annotations

import json
import random
import tempfile
import time
import urllib.error
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from campaign.parts import Counts
from campaign.servers import error_lines, server

from helpers.modes import assert_nothing_leaked
from helpers.tiny_model import VOCAB_SIZE, save_tiny_llama
from kvevict_tools.launcher import RunningServer
from kvevict_tools.measure import plugin_state

POOL = 400
FLAGS = ("--max-total-tokens", str(POOL), "--context-length", "4096", "--chunked-prefill-size", "128")
CONFIG = {"min_prefix_tokens": 48, "tail_tokens": 16}
TIERS: tuple[dict[str, Any], ...] = ({"host_bytes": 0}, {})
"""Without the host's memory what the pool drops is loaded from the store."""
ORDERS = 50
WITH_WEIGHTS = 0.3
"""Share of a unit's orders that change weights, too: the last ones, because the store is off afterwards."""
NUM_REQUESTS = 4
CALLS = ("in_place", "retract", "abort", "continue", "flush", "abort all")
Body = dict[str, Any]


def unit(seed: int, share: float) -> Counts:
    """One server. Each order of calls has requests of its own; all are answered, and no slot is missing after each."""
    rng = random.Random(seed)
    documents = [rng.choices(range(3, VOCAB_SIZE), k=200) for _ in range(12)]
    count, done = max(int(ORDERS * share), 2), Counter[str]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = {**CONFIG, **TIERS[seed % len(TIERS)], "store": str(folder / "store")}
        models = [str(save_tiny_llama(folder / f"weights-{i}", seed=i)) for i in (1, 2)]
        with server(*FLAGS, config=config) as running, ThreadPoolExecutor(NUM_REQUESTS) as pool:
            for document in documents:
                _ask(running, document, rng.random())
            for number in range(count):
                bodies = [_body(rng, documents) for _ in range(NUM_REQUESTS)]
                answers = [pool.submit(_ask, running, body, rng.uniform(0, 0.3)) for body in bodies]
                done.update(_order(running, rng, models if number >= count * (1 - WITH_WEIGHTS) else []))
                done.update(answer.result() for answer in answers)
                assert_nothing_leaked(running)
            compressions, state = assert_nothing_leaked(running), plugin_state(running)
            assert not error_lines(running), error_lines(running)[:3]
    loaded = state["loaded_segments"]
    assert compressions and done["answered"], done
    return {"done": count, "compressions": compressions, "loaded from the store": loaded, **done}


def _order(running: RunningServer, rng: random.Random, models: list[str]) -> Counter[str]:
    """Make calls, and let the server go on after the last one; return how often each was made."""
    calls: Counter[str] = Counter()
    mode = ""
    for _ in range(rng.randrange(2, 8)):
        call = rng.choice((*CALLS, *(["weights"] if models else [])))
        if call == "abort" and mode == "in_place":
            continue  # it waits in SGLang until all requests have ended, which are not run, and nobody can continue
        time.sleep(rng.uniform(0, 0.15))
        if call in ("in_place", "retract", "abort"):
            mode = call
            running.post("/pause_generation", {"mode": call})
        elif call == "continue":
            mode = ""
            running.post("/continue_generation", {})
        elif call == "abort all":
            running.post("/abort_request", {"abort_all": True})
        else:
            _may_be_refused(running, call, rng, models)
        calls[call] += 1
    running.post("/continue_generation", {})
    return calls


def _may_be_refused(running: RunningServer, call: str, rng: random.Random, models: list[str]) -> None:
    """A flush is refused while requests run, also that after new weights, which are in use all the same."""
    try:
        if call == "flush":
            running.post("/flush_cache")
        else:
            body = {"model_path": rng.choice(models), "flush_cache": rng.random() < 0.5}
            running.post("/update_weights_from_disk", body)
    except urllib.error.HTTPError as error:
        assert error.code == 400 and error.read(), call


def _body(rng: random.Random, documents: list[list[int]]) -> Body:
    """A prompt longer than the pool, or one of the documents and a question."""
    sampling: Body = {"temperature": 0, "max_new_tokens": rng.choice([1, 8, 40]), "ignore_eos": True}
    question = rng.choices(range(3, VOCAB_SIZE), k=rng.randrange(1, 30))
    is_long = rng.random() < 0.3
    prompt = rng.choice(documents) * rng.choice([2, 3, 4]) if is_long else rng.choice(documents)
    if rng.random() < 0.5:
        wish = rng.choice([{"retain": 5.0}, {"retain": 60.0}, {"exact": True}, {"share": 0.5}, {"complete": True}])
        sampling["custom_params"] = {"kvevict": wish}
    if not is_long and rng.random() < 0.3:
        sampling["n"] = 3
    return {"input_ids": prompt + question, "sampling_params": sampling}


def _ask(running: RunningServer, body: Body | list[int], wait_s: float) -> str:
    """Ask after a moment; return how it was answered."""
    time.sleep(wait_s)
    if isinstance(body, list):
        body = {"input_ids": body, "sampling_params": {"max_new_tokens": 1}}
    try:
        answers = json.loads(running.post("/generate", body))
    except urllib.error.HTTPError as error:
        assert error.code in (400, 503) and error.read(), error.code
        return "refused with a reason"
    samples = answers if isinstance(answers, list) else [answers]
    reasons = [sample["meta_info"]["finish_reason"]["type"] for sample in samples]
    assert set(reasons) <= {"length", "abort"}, reasons
    return "aborted" if "abort" in reasons else "answered"
