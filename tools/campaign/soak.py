"""Servers under load: every way to schedule, one hour at saturation, and prompts of all lengths."""

from __future__ import annotations

import os
import random
import time
from concurrent.futures import ThreadPoolExecutor

from campaign.parts import Counts
from campaign.servers import error_lines, resident_mb, server

from helpers.modes import CONFIG, MODES, assert_nothing_leaked, serve_readers
from helpers.tiny_model import VOCAB_SIZE

MAX_GROWTH_MB = 100.0
NUM_CLIENTS = 60
VOCABULARY = range(3, VOCAB_SIZE)


def modes(seed: int, share: float) -> Counts:
    """One way to schedule."""
    name = list(MODES)[seed % len(MODES)]
    count = int(300 * share)
    cores = sorted(os.sched_getaffinity(0))
    env = {"SGLANG_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"} if name == "data-parallel" else {}
    with server(*MODES[name], config=CONFIG, env=env) as running:
        taken_off = serve_readers(running, count, seed=seed, priorities=name.startswith("priority"))
        compressions = assert_nothing_leaked(running)
    assert compressions > 0 and (taken_off or not name.startswith("priority")), (compressions, taken_off)
    counts = {f"requests with {name}": count, f"taken off and run again with {name}": taken_off}
    return {"done": count, "compressions": compressions, **{what: number for what, number in counts.items() if number}}


def soak(seed: int, share: float) -> Counts:
    """An hour at saturation; memory of all processes must be flat after the first sixth of it."""
    minutes = 60 * share
    sizes, number, compressions = [], 0, 0
    with server(config=CONFIG) as running:
        end = time.monotonic() + 60 * minutes
        while time.monotonic() < end:
            number += 1
            serve_readers(running, 200, seed=seed * 10_000 + number, priorities=False)
            sizes.append(resident_mb(running))
        compressions = assert_nothing_leaked(running)
        errors = error_lines(running)
        assert not errors, errors[:3]
    early = max(sizes[: max(len(sizes) // 6, 1)])
    assert sizes[-1] < early + MAX_GROWTH_MB, f"{early:.0f} MB early, {sizes[-1]:.0f} MB at the end"
    largest = {"largest MB in the first sixth": early, "largest MB at the end": sizes[-1]}
    return {"done": minutes, "requests": 200 * number, "compressions": compressions, **largest}


def lengths(seed: int, share: float) -> Counts:
    """60 clients with prompts and answers of random lengths for half an hour, in bfloat16; one in 50 exceeds the pool.

    Each number of tokens in a forward is a shape of its own to compiled kernels and to malloc. Memory of all processes
    is printed every minute and must be flat after the first third.
    """
    seconds = 30 * 60 * share
    rng = random.Random(seed)
    documents = [rng.choices(VOCABULARY, k=900) for _ in range(200)]
    flags = ("--dtype", "bfloat16", "--max-total-tokens", "2000", "--context-length", "4096")
    with server(*flags, config={}) as running, ThreadPoolExecutor(NUM_CLIENTS) as pool:
        begin = time.monotonic()

        def serve(client: int) -> int:
            own, number = random.Random(seed * NUM_CLIENTS + client), 0
            while time.monotonic() < begin + seconds:
                shared = own.choice(documents)[: own.randrange(50, 800)] if own.random() < 0.25 else []
                length = own.randrange(2000, 3200) if own.random() < 0.02 else own.randrange(3, 150)
                prompt = shared + own.choices(VOCABULARY, k=length)
                sampling = {"temperature": 0, "max_new_tokens": own.randrange(1, 13), "ignore_eos": True}
                running.post("/generate", {"input_ids": prompt, "sampling_params": sampling}, timeout_s=600)
                number += 1
            return number

        clients = [pool.submit(serve, client) for client in range(NUM_CLIENTS)]
        sizes = []
        while not all(client.done() for client in clients):
            sizes.append(resident_mb(running))
            print(f"{time.monotonic() - begin:.0f} s: {sizes[-1]:.0f} MB", flush=True)
            time.sleep(seconds / 30)
        requests = sum(client.result() for client in clients)
        compressions = assert_nothing_leaked(running)
        errors = error_lines(running)
        assert not errors, errors[:3]
    early = max(sizes[: max(len(sizes) // 3, 1)])
    assert sizes[-1] < early + MAX_GROWTH_MB, f"{early:.0f} MB early, {sizes[-1]:.0f} MB at the end"
    largest = {"largest MB in the first third": early, "largest MB at the end": sizes[-1]}
    return {"done": seconds / 60, "requests": requests, "compressions": compressions, **largest}
