"""All kinds of requests at once on a real server, on a pool that is too small for them."""

from __future__ import annotations

import json
import random
import re
import socket
import time
import urllib.error
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from campaign.parts import Counts
from campaign.servers import ADAPTERS, whole_server

from helpers.modes import CONFIG, assert_nothing_leaked
from helpers.tiny_model import VOCAB_SIZE
from kvevict_tools.launcher import RunningServer

CROWD, FEW = 24, 4
"""Clients of the first half of a unit, whose requests alone are more than the pool, and of the second half, beside
whose requests prefixes stay long enough to be found, scored and compressed."""
LONG, MIXED = (1, 40, 150, 300, 400, 400), (0, 1, 8, 40, 150, 300)
"""New tokens of their requests: long answers of a crowd do not fit, and SGLang retracts some."""
POLICIES = ("distilled", "snapkv", "ada-snapkv", "k-vec")
HEAD_DIM = 64
"""Of the model that ``distilled`` serves: large enough for rows of 4 bits."""
SCHEMA = {
    "type": "object",
    "properties": {"found": {"type": "boolean"}, "colour": {"enum": ["red", "green"]}},
    "required": ["found", "colour"],
    "additionalProperties": False,
}
REGEX = "(red|green|blue){1,3}"
RETRACTED = re.compile(r"KV cache pool is full\. Retract requests\. #retracted_reqs: (\d+)")
Body = dict[str, Any]


def unit(seed: int, share: float) -> Counts:
    """One policy and one chunk size."""
    rng = random.Random(seed)
    policy, count = POLICIES[seed % len(POLICIES)], int(1000 * share)
    documents = [[rng.randrange(3, VOCAB_SIZE) for _ in range(400)] for _ in range(6)]
    flags = ("--chunked-prefill-size", rng.choice(["64", "128", "4096"]))
    head_dim = HEAD_DIM if policy == "distilled" else 16
    with whole_server(*flags, config={**CONFIG, "policy": policy}, head_dim=head_dim) as running:
        done: Counter[str] = Counter()
        for begin, clients, lengths in ((0, CROWD, LONG), (count // 2, FEW, MIXED)):
            numbers = range(seed * 10**6 + begin, seed * 10**6 + begin + count // 2)
            with ThreadPoolExecutor(clients) as pool:
                done.update(
                    pool.map(
                        lambda number, lengths=lengths: _request(running, documents, number, policy, lengths), numbers
                    )
                )
        compressions = assert_nothing_leaked(running)
        retracted = sum(map(int, RETRACTED.findall(running.log())))
        running.post("/flush_cache?timeout=60")
        assert_nothing_leaked(running)
    assert compressions and (retracted or count < 500), f"{compressions} compressions, {retracted} retractions"
    kinds = {f"requests: {name}": number for name, number in done.items()}
    return {"done": done.total(), "compressions": compressions, "retracted for want of slots": retracted, **kinds}


def _request(running: RunningServer, documents: list[list[int]], seed: int, policy: str, lengths: Sequence[int]) -> str:
    rng = random.Random(seed)
    kind = rng.choice(["plain"] * 14 + [kind for kind in KINDS for _ in range(1 if kind in RARE else 3)])
    prompt = rng.choice(documents)[: rng.choice([0, 3, 100, 300, 400])]
    prompt = prompt + [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(1, 50))]
    sampling: Body = {"max_new_tokens": rng.choice(lengths), "temperature": rng.choice([0, 1.0])}
    sampling["ignore_eos"] = rng.random() < 0.5
    body: Body = {"input_ids": prompt, "sampling_params": sampling, "rid": f"request-{seed}"}
    if rng.random() < 0.3:
        body[rng.choice(["extra_key", "cache_salt"])] = rng.choice(["a", "b"])
    if rng.random() < 0.3:
        body["lora_path"] = rng.choice(ADAPTERS)
    if rng.random() < 0.4:
        sampling["custom_params"] = {"kvevict": _wish(rng)}
    answer = KINDS.get(kind, _post)(running, body, rng)
    return kind if answer else f"{kind}, refused with a reason"


def _wish(rng: random.Random) -> Body:
    wishes: list[Body] = [
        {"exact": True},
        {"retain": rng.choice([0.5, 5.0])},
        {"retain": 2.0, "share": 0.5},
        {"complete": True},
    ]
    return rng.choice(wishes)


def _post(running: RunningServer, body: Body, _rng: random.Random | None = None) -> Any:
    """The answer; None if it was refused for a reason."""
    try:
        return json.loads(running.post("/generate", body))
    except urllib.error.HTTPError as error:
        reason = error.read()
        assert error.code in (400, 503) and reason, (error.code, reason)
        return None


def _bad(running: RunningServer, body: Body, rng: random.Random) -> None:
    bad = rng.choice([5, "x" * 10**6, {"share": ["a"]}, {"exact": 1}])
    body["sampling_params"]["custom_params"] = {"kvevict": bad}
    assert _post(running, body) is None


def _several(running: RunningServer, body: Body, rng: random.Random) -> Any:
    body["sampling_params"] |= {"n": 3, "temperature": 1.0}
    answer = _post(running, body)
    assert answer is None or len(answer) == 3
    return answer


def _stream(running: RunningServer, body: Body, rng: random.Random) -> bool:
    try:
        lines = running.post("/generate", body | {"stream": True})
    except urllib.error.HTTPError as error:
        assert error.code in (400, 503) and error.read()
        return False
    assert lines.strip().endswith(b"data: [DONE]")
    return b'"error"' not in lines


def _stop(running: RunningServer, body: Body, rng: random.Random) -> Any:
    stop = {"stop_token_ids": [rng.randrange(VOCAB_SIZE) for _ in range(40)], "stop": ["a", "the"]}
    body["sampling_params"] |= stop
    return _post(running, body)


def _logprobs(running: RunningServer, body: Body, rng: random.Random) -> Any:
    start = rng.choice([0, len(body["input_ids"]) // 2])
    return _post(running, body | {"return_logprob": True, "logprob_start_len": start})


def _schema(running: RunningServer, body: Body, rng: random.Random) -> Any:
    body["sampling_params"] |= {"json_schema": json.dumps(SCHEMA), "max_new_tokens": 150, "ignore_eos": False}
    answer = _post(running, body)
    if answer is not None and answer["meta_info"]["finish_reason"]["type"] == "stop":
        values = json.loads(answer["text"])
        assert isinstance(values["found"], bool) and values["colour"] in ("red", "green"), answer["text"]
    return answer


def _regex(running: RunningServer, body: Body, rng: random.Random) -> Any:
    body["sampling_params"] |= {"regex": REGEX, "max_new_tokens": 40, "ignore_eos": False}
    answer = _post(running, body)
    if answer is not None and answer["meta_info"]["finish_reason"]["type"] == "stop":
        assert re.fullmatch(REGEX, answer["text"]), answer["text"]
    return answer


def _abort(running: RunningServer, body: Body, rng: random.Random) -> Any:
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(_post, running, body)
        time.sleep(rng.uniform(0, 0.2))
        running.post("/abort_request", {"rid": body["rid"]})
        return answer.result()


def _pause(running: RunningServer, body: Body, rng: random.Random) -> Any:
    running.post("/pause_generation", {"mode": rng.choice(["in_place", "retract"])})
    time.sleep(rng.uniform(0, 0.1))
    running.post("/continue_generation", {})
    return _post(running, body)


def _flush(running: RunningServer, body: Body, rng: random.Random) -> Any:
    """A flush is refused while requests run; while they are paused and retracted it is not."""
    paused = rng.random() < 0.5
    if paused:
        running.post("/pause_generation", {"mode": "retract"})
    try:
        running.post("/flush_cache")
    except urllib.error.HTTPError as error:
        assert error.code == 400
    if paused:
        running.post("/continue_generation", {})
    return _post(running, body)


def _unload(running: RunningServer, body: Body, rng: random.Random) -> Any:
    """An adapter goes and comes back; requests for it are refused in between."""
    name = rng.choice(ADAPTERS)
    path = next(word for word in running.process.args if str(word).startswith(f"{name}=")).partition("=")[2]
    for operation, values in (("unload", {}), ("load", {"lora_path": path})):
        try:
            running.post(f"/{operation}_lora_adapter", {"lora_name": name, **values})
        except urllib.error.HTTPError as error:
            assert error.code == 400 and error.read()
    return _post(running, body)


def _hang_up(running: RunningServer, body: Mapping[str, Any], rng: random.Random) -> bool:
    data = json.dumps({**body, "stream": True}).encode()
    port = int(running.url.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port)) as connection:
        head = "POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)
        connection.recv(1)
    return True


KINDS: Mapping[str, Callable[[RunningServer, Body, random.Random], Any]] = {
    "bad options": _bad,
    "n = 3": _several,
    "stream": _stream,
    "stop strings": _stop,
    "log-probabilities": _logprobs,
    "JSON schema": _schema,
    "regex": _regex,
    "abort": _abort,
    "pause and continue": _pause,
    "flush": _flush,
    "adapter unloaded": _unload,
    "hang up": _hang_up,
}
RARE = ("flush", "adapter unloaded")
"""What takes prefixes away for good: after each, there is nothing to be found for a while."""
