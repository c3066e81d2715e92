"""The three servers under test and what is done to each of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sgl_kvevict.launcher import STRICT_CHECK_ENV, RunningServer, System, kvevict_system, launch, stock_system
from sgl_kvevict.measure import flush, idle_gauges, plugin_state, time_stream, wait_until_scored

from .programs import Answer, max_overlap, run_branches, run_chat
from .questions import BRANCH_QUESTIONS, CHAT_QUESTIONS, system_prompt

PREFILL_ROUNDS = 2
DECODE_ROUNDS = 3
DECODE_TOKENS = 48
_DECODE_QUESTION = "Describe a day at the station."

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Figures:
    """What was measured on one system. Token slots and logical tokens are different units."""

    name: str
    prefix_tokens: int
    prefix_slots: int
    sharers: int
    cached_tokens: int
    decode_tokens_per_s: float
    ttft_cold_s: float
    ttft_cached_s: float
    scoring_s: float
    branches_s: float
    branch_answers: tuple[Answer, ...]
    chat_answers: tuple[Answer, ...]
    checker_complaints: tuple[str, ...]
    leaked_slots: int
    seconds: float
    state: Mapping[str, Any] = field(default_factory=dict)

    @property
    def pool_leaks(self) -> int:
        """Complaints of SGLang's checker plus slots that our own accounting misses."""
        return len(self.checker_complaints) + self.leaked_slots


def systems(policy: str, budget: float | int, pool_slots: int) -> tuple[System, System, System]:
    """Stock, ours keeping everything, ours at ``budget``: same model, same pool of ``pool_slots``."""
    flags = (
        *("--max-total-tokens", str(pool_slots), "--random-seed", "42"),
        *("--enable-metrics", "--decode-log-interval", "1", "--enable-cache-report"),
    )

    def ours(name: str, share: float | int) -> System:
        config = {"policy": policy, "budget": share, "expose_kept": True}
        return kvevict_system(name, config, flags, STRICT_CHECK_ENV)

    return (
        stock_system("stock", flags, STRICT_CHECK_ENV),
        ours("budget 1.0", 1.0),
        ours(f"budget {budget}", budget),
    )


def run_system(system: System, model: Path, log_path: Path, progress: Progress) -> Figures:
    """Start one server, run everything on it, stop it.

    Raises:
        LaunchError: the server did not start, or died on the way (a leak found by SGLang's checker ends it).
    """
    started = time.monotonic()
    progress("starting the server")
    with launch(model, flags=system.flags, env=system.env, log_path=log_path) as server:
        return _exercise(server, system, progress, started)


def _exercise(server: RunningServer, system: System, progress: Progress, started: float) -> Figures:
    prompt = system_prompt()
    prefix_text = f"<|im_start|>system\n{prompt}<|im_end|>\n"
    prefix_tokens, ttft_cold_s = _time_prefill(server, prefix_text, progress)

    flush(server)
    empty = idle_gauges(server)
    at_fork: dict[str, Any] = {}

    def look_at_pool() -> None:
        at_fork["scoring_s"] = wait_until_scored(server)
        at_fork["slots"] = idle_gauges(server).evictable - empty.evictable
        at_fork["state"] = plugin_state(server) or {}
        at_fork["time"] = time.monotonic()
        progress(f"{prefix_tokens} prefix tokens held in {at_fork['slots']} token slots; asking all questions")

    progress("frontend program: caching the shared document")
    branch_answers = run_branches(server.url, prompt, BRANCH_QUESTIONS, look_at_pool)
    branches_s = time.monotonic() - at_fork["time"]
    progress(f"chat: {len(CHAT_QUESTIONS)} turns on the same document")
    chat_answers = run_chat(server.url, prompt, CHAT_QUESTIONS)
    decode = _time_decode(server, prefix_text, progress)
    leaked, sharers = _close_books(server)
    return Figures(
        name=system.name,
        prefix_tokens=prefix_tokens,
        prefix_slots=at_fork["slots"],
        sharers=max_overlap(branch_answers) if sharers is None else sharers,
        cached_tokens=sum(answer.cached_tokens for answer in (*branch_answers, *chat_answers)),
        decode_tokens_per_s=decode,
        ttft_cold_s=ttft_cold_s,
        ttft_cached_s=statistics.median(answer.ttft_s or 0.0 for answer in chat_answers),
        scoring_s=at_fork["scoring_s"],
        branches_s=branches_s,
        branch_answers=tuple(branch_answers),
        chat_answers=tuple(chat_answers),
        checker_complaints=tuple(server.leak_messages()),
        leaked_slots=leaked,
        seconds=time.monotonic() - started,
        state=at_fork["state"],
    )


def _time_prefill(server: RunningServer, prefix_text: str, progress: Progress) -> tuple[int, float]:
    """(prefix tokens, median seconds to the first token without any cache); one round to warm up first."""
    timings = []
    for round_number in range(PREFILL_ROUNDS + 1):
        progress("prefill: warming up" if round_number == 0 else f"prefill: round {round_number}")
        flush(server)
        timings.append(time_stream(server, prefix_text, max_new_tokens=1))
    return timings[0].prompt_tokens, statistics.median(timing.ttft_s for timing in timings[1:])


def _time_decode(server: RunningServer, prefix_text: str, progress: Progress) -> float:
    """Median tokens per second of one request on the cached prefix; one short round to warm up first."""
    turn = f"<|im_start|>user\n{_DECODE_QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    time_stream(server, prefix_text + turn, max_new_tokens=4)
    rates = []
    for round_number in range(1, DECODE_ROUNDS + 1):
        progress(f"decode: round {round_number} of {DECODE_ROUNDS}")
        rates.append(time_stream(server, prefix_text + turn, DECODE_TOKENS).decode_tokens_per_s)
    return statistics.median(rates)


def _close_books(server: RunningServer) -> tuple[int, int | None]:
    """(slots that are lost, most requests seen reading one span; None on stock) of the idle server."""
    missing = idle_gauges(server).missing
    state = plugin_state(server)
    server.check_alive()
    if state is None:
        return missing, None
    return missing + abs(int(state["leaked_slots"])), int(state["max_sharers"])
