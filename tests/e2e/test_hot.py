"""A prefix that is read without a pause is scored and compressed while it is read, and all answers arrive."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from helpers.modes import assert_nothing_leaked
from helpers.tiny_model import VOCAB_SIZE
from helpers.traffic import generate
from kvevict_tools.measure import plugin_state, wait_until_scored

FLAGS = ("--skip-tokenizer-init", "--max-total-tokens", "6000", "--context-length", "2048")
CONFIG = {"policy": "reconstruction", "min_prefix_tokens": 48, "tail_tokens": 16, "pass_share": 0.2}
NUM_CLIENTS = 4
LONG_ANSWER = 600


def happens_before_the_answer(server, reader: Future, has_happened: Callable[[dict], bool]) -> bool:
    """Whether something is true of the server before a reader has its answer."""
    while not reader.done():
        state = plugin_state(server)
        assert state is not None
        if has_happened(state):
            return not reader.done()
        time.sleep(0.02)
    return False


def test_a_prefix_is_compressed_while_clients_never_pause(start, tiny_llama):
    server = start(tiny_llama, *FLAGS, config=CONFIG, spins=True)
    rng = random.Random(3)
    prefix = [rng.randrange(3, VOCAB_SIZE) for _ in range(300)]
    stop = threading.Event()
    answers: list[tuple[int, dict]] = []

    def client(number: int) -> None:
        own = random.Random(number)
        for first in itertools.cycle(range(10 + number, VOCAB_SIZE, NUM_CLIENTS)):  # no two questions share more
            if stop.is_set():
                return
            num_tokens = own.randrange(8, 40)
            question = [first, *(own.randrange(3, VOCAB_SIZE) for _ in range(own.randrange(20)))]
            answers.append((num_tokens, generate(server, [*prefix, *question], num_tokens)))

    generate(server, prefix, 1)
    with ThreadPoolExecutor(NUM_CLIENTS + 1) as pool:
        reader = pool.submit(generate, server, [*prefix, 5], LONG_ANSWER)  # it locks the prefix all the time
        clients = [pool.submit(client, number) for number in range(NUM_CLIENTS)]
        try:
            was_scored = happens_before_the_answer(
                server, reader, lambda state: state["pending_ranges"] + state["compressions"] > 0
            )
            was_compressed = happens_before_the_answer(server, reader, lambda state: state["compressions"] > 0)
            time.sleep(0.5)  # answers go on
        finally:
            stop.set()
        assert len(reader.result()["output_ids"]) == LONG_ANSWER
        for each in clients:
            each.result()
    assert len(answers) > NUM_CLIENTS
    assert all(len(answer["output_ids"]) == num_tokens for num_tokens, answer in answers)
    wait_until_scored(server)
    assert assert_nothing_leaked(server) >= 1
    assert was_scored, "scoring passes complete while clients never pause"
    assert was_compressed, "compressions >= 1 while clients never pause"
