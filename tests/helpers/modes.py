"""Ways to schedule requests, and traffic with priorities for all of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from helpers.tiny_model import VOCAB_SIZE
from helpers.traffic import generate, states_with_all_slots
from kvevict_tools.launcher import RunningServer

FLAGS = ("--skip-tokenizer-init", "--max-total-tokens", "2000", "--context-length", "1024")
CONFIG = {"policy": "snapkv", "min_prefix_tokens": 48, "tail_tokens": 16, "policy_options": {"window_size": 16}}
PRIORITIES = (
    *("--enable-priority-scheduling", "--priority-scheduling-preemption-threshold", "1"),
    *("--max-running-requests", "4"),  # so that a more urgent request finds no place
)
MODES: dict[str, Sequence[str]] = {
    **{
        name: ("--schedule-policy", name)
        for name in ("lpm", "dfs-weight", "hrrn", "shortest-prefill-first", "fcfs", "lof", "random", "routing-key")
    },
    "priority": PRIORITIES,
    "priority-low-first": (*PRIORITIES, "--schedule-low-priority-values-first", "--schedule-policy", "lof"),
    "priority-no-overlap": (*PRIORITIES, "--disable-overlap-schedule"),
    "mixed-chunk": ("--enable-mixed-chunk", "--chunked-prefill-size", "64"),
    "no-overlap": ("--disable-overlap-schedule",),
    "data-parallel": ("--dp-size", "2"),
}


def serve_readers(server: RunningServer, count: int, *, seed: int, priorities: bool) -> int:
    """Requests that share a few documents, so that prefixes are found and compressed all the time.

    Returns:
        How often one was taken off and run again, for want of slots or for a more urgent one.

    Raises:
        urllib.error.HTTPError: a request was refused.
    """
    rng = random.Random(seed)
    documents = [[rng.randrange(3, VOCAB_SIZE) for _ in range(300)] for _ in range(4)]

    def ask(i: int) -> int:
        own = random.Random(seed * 10_000 + i)
        prompt = own.choice(documents) + [own.randrange(3, VOCAB_SIZE) for _ in range(own.randrange(1, 30))]
        count, is_urgent = own.choice([1, 4, 40]), priorities and own.random() < 0.8
        answer = generate(server, prompt, count, **({"priority": own.randrange(-3, 20)} if is_urgent else {}))
        assert len(answer["output_ids"]) == count
        return int(answer["meta_info"]["num_retractions"])

    with ThreadPoolExecutor(12) as pool:
        return sum(pool.map(ask, range(count)))


def assert_nothing_leaked(server: RunningServer) -> int:
    """See :func:`helpers.traffic.states_with_all_slots`; return how many compressions there were."""
    return sum(int(state["compressions"]) for state in states_with_all_slots(server))
