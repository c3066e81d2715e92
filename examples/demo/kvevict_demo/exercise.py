"""What is run on the servers: programs once, measurements in rounds, in turn."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvevict_tools.launcher import RunningServer
from kvevict_tools.measure import flush, idle_gauges, in_turn, plugin_state, time_stream

from .pressure import Shown, ask, show_documents
from .programs import max_overlap, run_branches, run_chat
from .progress import Progress
from .questions import BRANCH_QUESTIONS, CHAT_QUESTIONS, system_prompt
from .rounds import Samples
from .systems import NOTHING_COMPRESSED, OURS, STOCK, Figures, Rounds

DECODE_TOKENS: Mapping[str, int] = {STOCK: 16, NOTHING_COMPRESSED: 48, OURS: 48}
"""Stock generates fewer, because it takes longer."""
ONCE_S: Mapping[str, Mapping[str, float]] = {
    "programs": {STOCK: 55.0, NOTHING_COMPRESSED: 25.0, OURS: 25.0},
    "documents": {STOCK: 30.0, NOTHING_COMPRESSED: 30.0, OURS: 35.0},
}
ROUND_S: Mapping[str, Mapping[str, float]] = {
    "cold": {STOCK: 4.0, NOTHING_COMPRESSED: 4.0, OURS: 4.0},
    "cached": {STOCK: 3.0, NOTHING_COMPRESSED: 0.3, OURS: 0.3},
    "decode": {STOCK: 5.0, NOTHING_COMPRESSED: 2.5, OURS: 2.5},
    "pressure": {STOCK: 8.0, NOTHING_COMPRESSED: 8.0, OURS: 2.0},
}
"""Seconds on two cores of what is done once, and of each round: for the estimate of what is left."""


def expected_s(names: Iterable[str], num_rounds: int) -> float:
    """Seconds that an exercise takes on two cores."""
    return sum(
        sum(step[name] for step in ONCE_S.values()) + num_rounds * sum(step[name] for step in ROUND_S.values())
        for name in names
    )


class Exercise:
    """Everything that the demo does with servers that run side by side.

    Args:
        fleet: servers by name.
        num_rounds: of each measurement.
        pool_slots: token slots of each server's pool.
        rounds: what is measured is added to it.
        progress: told about every step.
    """

    def __init__(
        self, fleet: Mapping[str, RunningServer], num_rounds: int, pool_slots: int, rounds: Rounds, progress: Progress
    ) -> None:
        self._fleet = fleet
        self._num_rounds = num_rounds
        self._pool_slots = pool_slots
        self._rounds = rounds
        self._progress = progress
        self._prefix = f"<|im_start|>system\n{system_prompt()}<|im_end|>\n"
        self._shown: dict[str, Shown] = {}

    def run(self) -> list[Figures]:
        """Do it.

        Raises:
            LaunchError: a server died on the way (a leak found by SGLang's checker ends it).
        """
        names = list(self._fleet)
        in_turn(self._fleet, self._num_rounds, self._cold)
        programs = {name: self._run_programs(name) for name in names}
        in_turn(self._fleet, self._num_rounds, self._cached)
        in_turn(self._fleet, self._num_rounds, self._decode)
        for name in names:
            self._progress.step(f"{name}: caching documents of 4 times the pool", ONCE_S["documents"][name])
            self._shown[name] = show_documents(self._fleet[name], self._pool_slots)
        in_turn(self._fleet, self._num_rounds, self._pressure)
        return [self._figures(name, programs[name]) for name in names]

    def _cold(self, name: str, number: int) -> None:
        self._begin("first token, nothing cached", "cold", name, number)
        flush(self._fleet[name])
        _add(self._rounds.ttft_cold_s, name, time_stream(self._fleet[name], self._prefix, 1).ttft_s)

    def _cached(self, name: str, number: int) -> None:
        self._begin("first token of a question on the cached document", "cached", name, number)
        prompt = self._prefix + _turn(f"Question {number}: who works at the station?")
        _add(self._rounds.ttft_cached_s, name, time_stream(self._fleet[name], prompt, 1).ttft_s)

    def _decode(self, name: str, number: int) -> None:
        self._begin("decode", "decode", name, number)
        prompt = self._prefix + _turn("Describe a day at the station.")
        timing = time_stream(self._fleet[name], prompt, DECODE_TOKENS[name])
        _add(self._rounds.decode_tokens_per_s, name, timing.decode_tokens_per_s)

    def _pressure(self, name: str, number: int) -> None:
        self._begin("questions on documents of 4 times the pool", "pressure", name, number)
        requests_per_s, found_share = ask(self._fleet[name], self._shown[name], number)
        _add(self._rounds.requests_per_s, name, requests_per_s)
        _add(self._rounds.found_share, name, found_share)

    def _begin(self, text: str, step: str, name: str, number: int) -> None:
        self._progress.step(f"{name}: {text}, round {number} of {self._num_rounds}", ROUND_S[step][name])

    def _run_programs(self, name: str) -> dict[str, Any]:
        """The forked program and the chat on an empty cache."""
        server = self._fleet[name]
        flush(server)
        empty = idle_gauges(server).evictable
        seen: dict[str, Any] = {}

        def look_at_pool() -> None:
            seen["prefix_slots"] = idle_gauges(server).evictable - empty
            seen["state"] = plugin_state(server) or {}
            self._progress.note(f"{name}: the document takes {seen['prefix_slots']:,} token slots; asking questions")

        self._progress.step(f"{name}: a frontend program and a chat on one document", ONCE_S["programs"][name])
        branches = run_branches(server.url, system_prompt(), BRANCH_QUESTIONS, look_at_pool)
        chat = run_chat(server.url, system_prompt(), CHAT_QUESTIONS)
        return seen | {
            "branch_answers": tuple(branches),
            "chat_answers": tuple(chat),
            "cached_tokens": sum(answer.cached_tokens for answer in (*branches, *chat)),
            "prefix_tokens": time_stream(server, self._prefix, 1).prompt_tokens,
        }

    def _figures(self, name: str, seen: dict[str, Any]) -> Figures:
        """Close the books of an idle server."""
        server, shown = self._fleet[name], self._shown[name]
        leaked = 0  # stock says so in its log; the gauges of a server that sleeps when idle are those of its last step
        state = plugin_state(server)
        server.check_alive()
        sharers = max_overlap(seen["branch_answers"])
        if state is not None:
            leaked = abs(int(state["leaked_slots"]))
            if state["span_tokens"]:  # readers of uncompressed prefixes are not counted there
                sharers = int(state["max_sharers"])
        return Figures(
            name=name,
            sharers=sharers,
            document_tokens=shown.tokens // len(shown.texts),
            document_slots=shown.slots_each,
            checker_complaints=tuple(server.leak_messages()),
            leaked_slots=leaked,
            **seen,
        )


def _turn(question: str) -> str:
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def _add(samples: Samples, name: str, value: float) -> None:
    samples.setdefault(name, []).append(value)
