"""Random requests, faults and a soak on real servers; each unit starts its own and leaves nothing behind."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import tempfile
import time
import urllib.error
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from campaign.parts import Counts

from helpers.e2e_env import ENV
from helpers.modes import CONFIG, FLAGS, MODES, assert_nothing_leaked, serve_readers
from helpers.tiny_model import VOCAB_SIZE, save_tiny_llama
from helpers.traffic import generate
from sgl_kvevict.launcher import KVEVICT_CPU_FLAGS, RunningServer, config_env, free_port, launch

RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "15"}
POLICIES = ("reconstruction", "questions", "ada-snapkv", "k-vec")


@contextmanager
def server(*flags: str, config: Mapping[str, Any], env: Mapping[str, str] | None = None) -> Iterator[RunningServer]:
    """A server on a tiny random model, with SGLang's leak checks on."""
    with tempfile.TemporaryDirectory() as folder:
        model = save_tiny_llama(Path(folder))
        variables = ENV | dict(env or {}) | config_env(config)
        log = Path(folder) / "server.log"
        with launch(model, flags=[*KVEVICT_CPU_FLAGS, *FLAGS, *flags], env=variables, log_path=log) as running:
            yield running


def modes(seed: int, share: float) -> Counts:
    """One way to schedule."""
    name = list(MODES)[seed % len(MODES)]
    count = int(300 * share)
    with server(*MODES[name], config=CONFIG) as running:
        serve_readers(running, count, seed=seed, priorities=name.startswith("priority"))
        if name != "data-parallel":
            assert_nothing_leaked(running)
    return {"done": count, f"requests with {name}": count}


def requests(seed: int, share: float) -> Counts:
    """All kinds of requests at once, on a pool that is too small for them."""
    rng = random.Random(seed)
    config = {**CONFIG, "policy": POLICIES[seed % len(POLICIES)]}
    documents = [[rng.randrange(3, VOCAB_SIZE) for _ in range(400)] for _ in range(6)]
    count = int(1000 * share)
    with server("--chunked-prefill-size", rng.choice(["64", "128", "4096"]), config=config, env=RETRACT) as running:
        with ThreadPoolExecutor(16) as pool:
            outcomes = list(pool.map(lambda i: _request(running, documents, seed * 10**6 + i), range(count)))
        assert_nothing_leaked(running)
        retracted = running.log().count("#retracted_reqs")
        running.post("/flush_cache?timeout=60")
        assert_nothing_leaked(running)
    return {"done": count, "refused with a reason": outcomes.count("refused"), "steps that retracted": retracted}


def _request(running: RunningServer, documents: list[list[int]], seed: int) -> str:
    rng = random.Random(seed)
    kind = rng.choice(
        ["plain"] * 8 + ["several", "stream", "stop", "hang up", "abort", "pause", "flush", "logprobs", "bad"]
    )
    prompt = rng.choice(documents)[: rng.choice([0, 3, 100, 300, 400])]
    prompt = prompt + [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(1, 50))]
    sampling: dict[str, Any] = {"max_new_tokens": rng.choice([0, 1, 8, 40]), "temperature": rng.choice([0, 1.0])}
    body: dict[str, Any] = {"input_ids": prompt, "sampling_params": sampling, "rid": f"request-{seed}"}
    if rng.random() < 0.3:
        body["extra_key"] = rng.choice(["a", "b"])
    if rng.random() < 0.2:
        sampling["custom_params"] = {"kvevict": {"warm": True, "ticket": f"the ticket of {seed}"}}
    if kind == "several":
        sampling |= {"n": 3, "temperature": 1.0}
    elif kind == "logprobs":
        body |= {"return_logprob": True, "logprob_start_len": rng.choice([0, len(prompt) // 2])}
    elif kind == "bad":
        sampling["custom_params"] = {"kvevict": rng.choice([5, "x" * 10**6, {"questions": ["a"]}, {"warm": 1}])}
    elif kind == "stop":
        sampling["stop_token_ids"] = [rng.randrange(VOCAB_SIZE) for _ in range(40)]
    elif kind == "pause":
        running.post("/pause_generation", {"mode": rng.choice(["in_place", "retract"])})
        running.post("/continue_generation", {})
    elif kind == "flush":
        with suppress(urllib.error.HTTPError):  # refused while requests run
            running.post("/flush_cache")
    if kind == "hang up":
        _hang_up(running, body)
        return "left"
    if kind == "abort":
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(_post, running, body)
            time.sleep(rng.uniform(0, 0.2))
            running.post("/abort_request", {"rid": body["rid"]})
            return answer.result()
    return _post(running, body | ({"stream": True} if kind == "stream" else {}))


def _post(running: RunningServer, body: Mapping[str, Any]) -> str:
    try:
        running.post("/generate", body)
    except urllib.error.HTTPError as error:
        assert error.code in (400, 503) and error.read(), error.code
        return "refused"
    return "answered"


def _hang_up(running: RunningServer, body: Mapping[str, Any]) -> None:
    data = json.dumps({**body, "stream": True}).encode()
    port = int(running.url.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port)) as connection:
        head = "POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)
        connection.recv(1)


def _events() -> dict[str, str]:
    return {name: f"tcp://127.0.0.1:{free_port()}" for name in ("endpoint", "replay_endpoint", "inspect_endpoint")}


def faults(seed: int, share: float) -> Counts:
    """One thing that goes wrong around a server."""
    fault = FAULTS[seed % len(FAULTS)]
    fault(seed, share)
    return {"done": 1, f"{fault.__name__[1:].replace('_', ' ')}": 1}


def _a_subscriber_that_never_reads(seed: int, share: float) -> None:
    import zmq

    events = {**_events(), "hwm": 10}
    with server(config={**CONFIG, "events": events}) as running, zmq.Context() as context:
        deaf = context.socket(zmq.SUB)
        deaf.setsockopt(zmq.RCVHWM, 1)
        deaf.setsockopt(zmq.LINGER, 0)
        deaf.setsockopt(zmq.SUBSCRIBE, b"")
        deaf.connect(events["endpoint"])
        serve_readers(running, int(200 * share), seed=seed, priorities=False)
        assert_nothing_leaked(running)
        deaf.close()


def _a_port_that_is_taken(seed: int, share: float) -> None:
    from sgl_kvevict.launcher import LaunchError

    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        taken = f"tcp://127.0.0.1:{holder.getsockname()[1]}"
        try:
            with server(config={**CONFIG, "events": {**_events(), "endpoint": taken}}):
                raise AssertionError("started on a port that is taken")
        except LaunchError as error:
            assert "cannot be bound" in str(error)


def _a_detokenizer_that_is_killed(seed: int, share: float) -> None:
    with server(config=CONFIG) as running:
        serve_readers(running, int(50 * share), seed=seed, priorities=False)
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if _parent(process) == running.process.pid and b"detokenizer" in (process / "cmdline").read_bytes():
                    os.kill(int(process.name), signal.SIGKILL)
        for _ in range(300):
            if not running.alive:
                return
            time.sleep(0.1)
        raise AssertionError("the server neither ended nor is whole")


def _parent(process: Path) -> int:
    return int((process / "stat").read_text().rsplit(")", 1)[1].split()[1])


def _a_full_disk_of_the_log(seed: int, share: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = save_tiny_llama(Path(folder))
        flags = [*KVEVICT_CPU_FLAGS, *FLAGS]
        with launch(model, flags=flags, env=ENV | config_env(CONFIG), log_path="/dev/full") as running:
            serve_readers(running, int(100 * share), seed=seed, priorities=False)
            assert generate(running, [5, 6, 7], 3)["output_ids"]


def _sigterm_in_the_middle_of_a_compression(seed: int, share: float) -> None:
    with server(config={**CONFIG, "scoring_pass_tokens": 16}) as running, ThreadPoolExecutor(1) as pool:
        traffic = pool.submit(serve_readers, running, int(200 * share), seed=seed, priorities=False)
        time.sleep(2.0)
        running.process.terminate()
        running.process.wait(60)
        assert "Traceback" not in running.log().split("SIGTERM")[0]
        traffic.exception()


FAULTS = (
    _a_subscriber_that_never_reads,
    _a_port_that_is_taken,
    _a_detokenizer_that_is_killed,
    _a_full_disk_of_the_log,
    _sigterm_in_the_middle_of_a_compression,
)


def soak(seed: int, share: float) -> Counts:
    """Minutes at saturation; resident memory of the scheduler must be flat after the first sixth of them."""
    minutes = 60 * share
    end, sizes, number = time.monotonic() + 60 * minutes, [], 0
    with server(config=CONFIG) as running:
        while time.monotonic() < end:
            number += 1
            serve_readers(running, 200, seed=seed * 10_000 + number, priorities=False)
            sizes.append(_resident_mb(running))
        assert_nothing_leaked(running)
        errors = [line for line in running.log().splitlines() if "ERROR" in line or "Traceback" in line]
        assert not errors, errors[:3]
    early = max(sizes[: max(len(sizes) // 6, 1)])
    assert sizes[-1] < early + 100, f"{early:.0f} MB early, {sizes[-1]:.0f} MB at the end"
    return {"done": minutes, "requests": 200 * number, "MB early": early, "MB at the end": sizes[-1]}


def _resident_mb(running: RunningServer) -> float:
    """Memory of all processes of a server."""
    group, pages = running.process.pid, 0
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            if os.getpgid(int(process.name)) == group:
                pages += int((process / "statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
