"""What every policy must do in a server: share one compressed prefix, split it, grow it over turns, leak nothing."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from fractions import Fraction

from helpers.traffic import assert_all_slots_are_back, generate, idle_state, random_jobs, run_jobs
from kvevict_tools.launcher import RunningServer

CONFIG = {"min_prefix_tokens": 48}
#: Chunks that are shorter than prompts, and retractions as if slots were short.
FLAGS = ("--chunked-prefill-size", "150")
ENV = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "15"}
NUM_QUESTIONS = 8
ANSWER_TOKENS = 16


@dataclass(frozen=True)
class Served:
    """What one server did, for the table.

    Attributes:
        policy: with its options.
        budget: share of entries kept.
        prefix: tokens of the shared prefix that were compressed, and the token slots they take.
        sharers: most requests that read one span at once.
        split: tokens found in the cache by a prompt that leaves the compressed prefix halfway.
        turns: tokens found in the cache by each turn of a conversation.
        compressions: segments written in all.
        requests: requests served in all.
        leaked: token slots that nobody owns at the end, plus complaints of SGLang's checkers.
    """

    policy: str
    budget: float
    prefix: str
    sharers: int
    split: int
    turns: str
    compressions: int
    requests: int
    leaked: int

    @staticmethod
    def header() -> str:
        """Heading of the table, two lines of Markdown."""
        names = [field.name for field in fields(Served)]
        return f"| {' | '.join(names)} |\n|{'---|' * len(names)}\n"

    def row(self) -> str:
        """One line of Markdown."""
        return f"| {' | '.join(str(getattr(self, field.name)) for field in fields(self))} |\n"


def serve_everything(
    server: RunningServer, label: str, budget: float, document: list[int], *, vocab_size: int
) -> Served:
    """Run all checks on a fresh server and empty its cache.

    Args:
        server: started with :data:`CONFIG`, :data:`FLAGS` and :data:`ENV`.
        label: policy and options, for the table.
        budget: the server's.
        document: shared prefix, at least 200 tokens.
        vocab_size: random tokens are taken from below.
    """
    prefix = cache_document(server, document, budget)
    sharers = ask_questions(server, document, vocab_size)
    split = leave_halfway(server, document)
    turns = converse(server, document, known=len(document))
    jobs = random_jobs(60, seed=3, vocab_size=vocab_size, longest=160)
    run_jobs(server, jobs, concurrency=16)
    state = assert_all_slots_are_back(server)
    compressions = state["compressions"]
    assert compressions > 10
    server.post("/flush_cache")
    flushed = assert_all_slots_are_back(server)
    assert flushed["free_slots"] == flushed["total_slots"] and flushed["spans"] == 0
    return Served(
        policy=label,
        budget=budget,
        prefix=prefix,
        sharers=sharers,
        split=split,
        turns=", ".join(map(str, turns)),
        compressions=compressions,
        requests=1 + NUM_QUESTIONS + 2 + len(turns) + len(jobs),
        leaked=flushed["leaked_slots"] + len(server.leak_messages()),
    )


def cache_document(server: RunningServer, document: list[int], budget: float) -> str:
    """Cache a prefix as the frontend language does; it takes exactly its share of token slots."""
    generate(server, document, 0)
    state = idle_state(server)
    tokens = len(document)
    slots = math.ceil(Fraction(str(budget)) * tokens)
    assert (state["span_tokens"], state["span_slots"]) == (tokens, slots)
    return f"{tokens} -> {slots}"


def ask_questions(server: RunningServer, document: list[int], vocab_size: int) -> int:
    """Many requests read the one copy at once; their log-probabilities are numbers."""
    before = idle_state(server)
    prompts = [document + [(37 * i + 11 * j) % (vocab_size - 3) + 3 for j in range(12)] for i in range(NUM_QUESTIONS)]
    with ThreadPoolExecutor(NUM_QUESTIONS) as pool:
        results = list(pool.map(lambda prompt: scored(server, prompt), prompts))
    for result in results:
        assert len(result) == ANSWER_TOKENS and all(math.isfinite(value) and value <= 0 for value in result)
    state = idle_state(server)
    assert (state["span_slots"], state["segments"]) == (before["span_slots"], before["segments"])
    assert state["max_sharers"] >= 2
    return int(state["max_sharers"])


def scored(server: RunningServer, prompt: list[int]) -> list[float]:
    """Log-probabilities of a greedy answer."""
    answer = generate(server, prompt, ANSWER_TOKENS, return_logprob=True)
    return [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]


def leave_halfway(server: RunningServer, document: list[int]) -> int:
    """Two prompts share only a part of the compressed prefix; one goes on long enough to be compressed as well."""
    half = len(document) // 2
    other = document[half - 1 :: -1] + document[:40]
    cached = []
    for prompt in (document[:half] + other[:20], document[:half] + other):
        result = generate(server, prompt, 4)
        assert len(result["output_ids"]) == 4
        cached.append(result["meta_info"]["cached_tokens"])
    state = idle_state(server)
    assert cached[0] == half and cached[1] >= half
    assert state["spans"] > state["segments"]
    return int(cached[0])


def converse(server: RunningServer, document: list[int], known: int) -> list[int]:
    """The first turn finds ``known`` tokens, each later one all of the turn before; all are compressed themselves."""
    prompt = [*document, *document[5:25]]
    cached: list[int] = []
    before = idle_state(server)["compressions"]
    for turn in range(3):
        result = generate(server, prompt, ANSWER_TOKENS)
        cached.append(result["meta_info"]["cached_tokens"])
        assert cached[-1] >= known
        known = len(prompt) + ANSWER_TOKENS - 1
        prompt = prompt + result["output_ids"] + document[7 * turn : 7 * turn + 60]
    assert idle_state(server)["compressions"] >= before + 2
    return cached
