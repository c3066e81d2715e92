"""Random traffic against a server: shared prefixes, turns, aborts, all lengths."""

from __future__ import annotations

import json
import random
import time
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from helpers.event_sockets import wait_until
from helpers.tiny_model import VOCAB_SIZE
from kvevict_tools.launcher import RunningServer
from kvevict_tools.measure import plugin_states

RETRACTIONS = {
    "SGLANG_CPU_OMP_THREADS_BIND": "0|1",  # one list of cores a rank
    "SGLANG_TEST_RETRACT": "1",
    "SGLANG_TEST_RETRACT_INTERVAL": "15",
}
"""Environment of a server of two ranks that retracts requests."""


@dataclass(frozen=True)
class Job:
    """One request.

    Attributes:
        rid: its id.
        input_ids: prompt.
        max_new_tokens: may be 0 (cache the prompt only).
        abort_after_s: abort it after this long; None: let it finish.
    """

    rid: str
    input_ids: list[int]
    max_new_tokens: int
    abort_after_s: float | None = None


def random_jobs(count: int, *, seed: int, vocab_size: int, longest: int = 400, aborts: bool = True) -> list[Job]:
    """Prompts that share prefixes of random lengths with a few documents and with each other."""
    rng = random.Random(seed)
    documents = [[rng.randrange(3, vocab_size) for _ in range(longest)] for _ in range(6)]
    jobs: list[Job] = []
    for i in range(count):
        document = rng.choice(documents)
        shared = rng.choice([0, 3, 40, longest // 2, longest * 3 // 4, longest])
        suffix = [rng.randrange(3, vocab_size) for _ in range(rng.choice([1, 2, 10, 60]))]
        if jobs and rng.random() < 0.2:
            document, shared = rng.choice(jobs).input_ids, longest
        jobs.append(
            Job(
                rid=f"job-{seed}-{i}",
                input_ids=(document[:shared] + suffix)[: longest + 60],
                max_new_tokens=rng.choice([0, 1, 2, 8, 16, 40]),
                abort_after_s=rng.uniform(0, 0.3) if aborts and rng.random() < 0.15 else None,
            )
        )
    return jobs


def numbers(seed: int, count: int) -> list[int]:
    """Random tokens of the tiny model."""
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(count)]


def generate(
    server: RunningServer, input_ids: list[int], max_new_tokens: int, custom_params: object = None, **fields: object
) -> dict[str, Any]:
    """Run one greedy request, with more ``fields``, to its end (or its abort)."""
    sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
    if custom_params is not None:
        sampling["custom_params"] = custom_params
    return json.loads(server.post("/generate", {"input_ids": input_ids, "sampling_params": sampling, **fields}))


def reply_to(server: RunningServer, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Status of a request to generate, and the answer or the error."""
    try:
        return 200, json.loads(server.post("/generate", body))
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def answers(
    server: RunningServer, prompts: list[list[int]], num_tokens: int, **options: Any
) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """Ask all at once; return output ids, and what SGLang says of each request."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        results = list(pool.map(lambda prompt: generate(server, prompt, num_tokens, **options), prompts))
    return [result["output_ids"] for result in results], [result["meta_info"] for result in results]


def run_jobs(server: RunningServer, jobs: list[Job], concurrency: int) -> dict[str, list[int]]:
    """Run all jobs; return the output ids of those that were not aborted."""

    def run(job: Job) -> tuple[str, list[int]]:
        return job.rid, generate(server, job.input_ids, job.max_new_tokens, rid=job.rid)["output_ids"]

    def abort(job: Job) -> None:
        time.sleep(job.abort_after_s or 0)
        server.post("/abort_request", {"rid": job.rid})

    with ThreadPoolExecutor(concurrency) as pool, ThreadPoolExecutor(4) as aborter:
        futures = []
        for job in jobs:
            futures.append(pool.submit(run, job))
            if job.abort_after_s is not None:
                aborter.submit(abort, job)
        outputs = dict(future.result() for future in futures)
    return {job.rid: outputs[job.rid] for job in jobs if job.abort_after_s is None}


def idle_state(server: RunningServer) -> dict[str, Any]:
    """Wait until nothing runs and return what the compressed cache holds."""
    return idle_states(server)[0]


def idle_states(server: RunningServer) -> list[dict[str, Any]]:
    """Wait until nothing runs and return what the compressed cache of each data-parallel scheduler holds."""
    states: list[dict[str, Any]] = []

    def is_idle() -> bool:
        states[:] = plugin_states(server)
        return all(state["protected_slots"] == 0 for state in states)

    wait_until(is_idle)
    return states


def assert_all_slots_are_back(server: RunningServer) -> dict[str, Any]:
    """See :func:`states_with_all_slots`; that of the first scheduler."""
    return states_with_all_slots(server)[0]


def states_with_all_slots(server: RunningServer) -> list[dict[str, Any]]:
    """See :func:`idle_states`; every slot is free or evictable, nothing failed, and ranks are equal."""
    server.check_alive()
    states = idle_states(server)
    assert server.leak_messages() == []
    for state in states:
        assert len({json.dumps(rank) for rank in state.get("ranks", [])}) <= 1
        assert state["leaked_slots"] == 0 and state["errors"] == {}
        assert state["free_slots"] + state["evictable_slots"] == state["total_slots"]
    return states
