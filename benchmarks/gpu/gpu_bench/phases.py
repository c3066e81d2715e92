"""What is asked of a server on a GPU: questions on a cached document, documents beyond the pool, traffic, answers."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from gpu_bench.rows import Rows
from gpu_bench.systems import Load, find_system, has_tokenizer
from kvevict_tools.launcher import RunningServer, ServerProcess, launch, spawn_process
from kvevict_tools.measure import plugin_states

Spawn = Callable[[Sequence[str], Mapping[str, str], IO[bytes]], ServerProcess]
Output = Sequence[Any]
"""Tokens of an answer, and their margins."""
START_SECONDS = 240.0
"""Limit of one start: the first one compiles kernels, which stay cached."""
START_SECONDS_LEFT = 60.0
"""No server is started with less."""
STOP_SECONDS = 20.0
"""Kept back for a server to end."""
START_OF = {"speed": "start", "answers": "start, answers", "mixed": "start, mixed"}
"""Rows of starts; only those of servers whose speed is measured are a column."""
TURNS = 5
FITTING = 3
"""Documents that fit the pool beside each other and their questions."""
QUESTIONS_EACH = 8
MIXED_SECONDS = 120.0
GREEDY_TOKENS = 24
PROMPT = "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is Madrid. " * 20
QUESTIONS = tuple(f"{PROMPT}The capital of {country} is" for country in ("France", "Spain"))


class Phases:
    """All phases of the servers of one run.

    Args:
        rows: receives what is measured, and says how much time is left.
        load: what is asked.
        model: folder with a ``config.json`` that fits ``load``.
        logs: folder of the servers' logs.
        is_gpu: see :func:`find_system`.
        graphs: likewise.
        spawn: see :func:`kvevict_tools.launcher.launch`.
    """

    def __init__(
        self,
        rows: Rows,
        load: Load,
        model: Path,
        logs: Path,
        *,
        is_gpu: bool,
        graphs: bool = True,
        spawn: Spawn = spawn_process,
    ) -> None:
        self.spawn = spawn
        self.mixed_seconds = MIXED_SECONDS
        self.rows, self.load, self.model, self.logs = rows, load, model, logs
        self.is_gpu, self.graphs = is_gpu, graphs

    def has_time(self, system: str, what: str, seconds: float) -> bool:
        """Whether so many seconds are left; if not, a row says that the phase was skipped."""
        if (left := self.rows.left()) >= seconds:
            return True
        self.rows.add(system, "skipped", phase=what, needs_s=seconds, left_s=round(left))
        return False

    @contextmanager
    def start(self, name: str, model: Path, what: str) -> Iterator[tuple[RunningServer, str]]:
        """Start a system, yield its server and its name, and stop it; ``what`` names its log.

        LaunchError: it does not start in time, or dies.
        """
        system = find_system(name, model, self.load, is_gpu=self.is_gpu, graphs=self.graphs)
        limit = min(START_SECONDS, max(1.0, self.rows.left() - STOP_SECONDS))
        log, start = self.logs / f"{what}-{name}.log", time.perf_counter()
        with launch(
            model, flags=system.flags, env=system.env, log_path=log, timeout_s=limit, spawn=self.spawn
        ) as server:
            self.rows.add(system.name, START_OF[what], seconds=time.perf_counter() - start, **facts(server))
            yield server, system.name

    def measure(self, name: str) -> None:
        """Start a system and measure what there is time for, the most valuable first."""
        chooser = random.Random(42)
        load = self.load

        def tokens(count: int) -> list[int]:
            return [chooser.randrange(10, int(load.model["vocab_size"])) for _ in range(count)]

        with self.start(name, self.model, "speed") as (server, system):
            document = tokens(load.document)
            self.rows.add(system, "first", seconds=generate(server, document, 1)["seconds"])
            wait_until_idle(server)
            self._ask_cached(server, system, document, tokens)
            for count in load.batches:
                if not self.has_time(system, f"decode {count}", 25.0):
                    return
                self._decode(server, system, [document + tokens(load.question) for _ in range(count)])
            self._fit(server, system, [document, *(tokens(load.document) for _ in range(FITTING - 1))], tokens)
            self._press(server, system, tokens, chooser)
            self._count_leaks(server, system)

    def _ask_cached(
        self, server: RunningServer, system: str, document: list[int], tokens: Callable[[int], list[int]]
    ) -> None:
        """Time to the first token of a question on the cached document, the median of some."""
        generate(server, document + tokens(self.load.question), 4)  # what is compiled when it is first used
        asked = [generate(server, document + tokens(self.load.question), 1) for _ in range(TURNS)]
        median = sorted(asked, key=lambda answer: answer["seconds"])[TURNS // 2]
        self.rows.add(system, "cached", ms=median["seconds"] * 1e3, cached_tokens=cached(median))

    def _decode(self, server: RunningServer, system: str, prompts: list[list[int]]) -> None:
        """Tokens per second of several questions on one document; their prompts are cached before the clock starts."""
        prefill, _ = generate_all(server, prompts, 1)
        generate_all(server, prompts, 2)  # what is compiled for so many requests
        seconds, answers = generate_all(server, prompts, self.load.answer)
        made = sum(len(answer["output_ids"]) for answer in answers)
        share = sum(map(cached, answers)) / sum(map(len, prompts))
        what = f"decode {len(prompts)}"
        self.rows.add(system, what, tokens_s=made / seconds, questions_prefill_s=prefill, cached_share=share)

    def _fit(
        self, server: RunningServer, system: str, documents: list[list[int]], tokens: Callable[[int], list[int]]
    ) -> None:
        """Questions on documents that fit the pool uncompressed: requests per second."""
        if not self.has_time(system, "fitting", 25.0):
            return
        for document in documents:
            generate(server, document, 1)
        wait_until_idle(server)
        prompts = [document + tokens(self.load.question) for document in documents * QUESTIONS_EACH]
        seconds, answers = generate_all(server, prompts, max(2, self.load.answer // 8), clients=8)
        found = sum(map(cached, answers)) / sum(map(len, prompts))
        self.rows.add(system, "fitting", requests_s=len(prompts) / seconds, cached_share=found)

    def _press(
        self, server: RunningServer, system: str, tokens: Callable[[int], list[int]], chooser: random.Random
    ) -> None:
        """Questions on documents that are several times the pool together: requests per second, and tokens found."""
        load, documents = self.load, []
        begin = time.perf_counter()
        for _ in range(load.excess * load.pool // load.document):
            if not self.has_time(system, "pressure", STOP_SECONDS):
                return
            documents.append(tokens(load.document))
            generate(server, documents[-1], 1)
        reading = time.perf_counter() - begin
        prompts = [document + tokens(load.question) for document in chooser.sample(documents, len(documents))]
        seconds, answers = generate_all(server, prompts, max(2, load.answer // 8), clients=4)
        found = sum(map(cached, answers)) / (len(documents) * load.document)
        self.rows.add(system, "pressure", requests_s=len(prompts) / seconds, found=found, reading_s=reading)

    def _count_leaks(self, server: RunningServer, system: str) -> None:
        leaks = len(server.leak_messages()) + sum(state["leaked_slots"] for state in plugin_states(server))
        self.rows.add(system, "leaks", leaks=leaks)

    def mix(self) -> None:
        """Random traffic with aborts against the compressed system: every slot comes back, nothing fails."""
        from helpers.traffic import assert_all_slots_are_back, random_jobs, run_jobs

        with self.start("ours", self.model, "mixed") as (server, system):
            end = time.monotonic() + min(self.mixed_seconds, self.rows.left() - STOP_SECONDS)
            done = aborted = seed = 0
            while seed == 0 or time.monotonic() < end:
                jobs = random_jobs(100, seed=seed, vocab_size=self.load.model["vocab_size"], longest=self.load.longest)
                answered = len(run_jobs(server, jobs, concurrency=16))
                done, aborted, seed = done + answered, aborted + len(jobs) - answered, seed + 1
            state = assert_all_slots_are_back(server)
            self.rows.add(
                system,
                "mixed",
                answered=done,
                aborted=aborted,
                leaks=state["leaked_slots"],
                errors=len(state["errors"]),
            )

    def compare(self, names: Sequence[str], model: Path, expected: Path | None = None) -> None:
        """Greedy answers of systems beside those of the first one, and beside recorded ones.

        Each prompt is asked twice: the second time it is cached, and compressed where the budget says so.

        Args:
            names: systems.
            model: folder with weights; without a tokenizer in it prompts are random tokens.
            expected: a file of rows with this phase of another device.
        """
        recorded = recorded_outputs(expected)
        chooser, first = random.Random(7), None
        vocabulary = int(json.loads((model / "config.json").read_text())["vocab_size"])
        prompts: list[Any] = [[chooser.randrange(10, vocabulary) for _ in range(600)] for _ in range(4)]
        for name in names:
            if not self.has_time(name, "answers", START_SECONDS_LEFT):
                return
            with self.start(name, model, "answers") as (server, system):
                answers = []
                for prompt in [*(QUESTIONS if has_tokenizer(model) else prompts)] * 2:
                    answers.append(generate(server, prompt, GREEDY_TOKENS, return_logprob=True, top_logprobs_num=2))
                    wait_until_idle(server)
                outputs = [[answer["output_ids"], margins(answer)] for answer in answers]
                first = outputs if first is None else first
                told = {"like_first": agreement(outputs, first), "first": names[0], "model": model.name}
                if system in recorded:
                    told["like_recorded"] = agreement(outputs, recorded[system])
                self.rows.add(system, "answers", **told, outputs=outputs)


def facts(server: RunningServer) -> dict[str, Any]:
    """What a server says of its pool, attention and captured steps."""
    info = server.get_json("/server_info")
    captured = re.search(r"Capture \S+ ?decode.* end\..*elapsed=([\d.]+)", server.log())
    states: list[dict[str, Any]] = info.get("internal_states") or [{}]
    memory = states[0].get("memory_usage", {})
    return {
        "pool": memory.get("token_capacity", info.get("max_total_num_tokens")),
        "attention": info.get("attention_backend"),
        "capture_s": float(captured[1]) if captured else "none captured",
    }


def generate(server: RunningServer, prompt: str | list[int], count: int, **options: Any) -> dict[str, Any]:
    """Ask for ``count`` tokens, greedily; the answer, with the seconds that it took."""
    body: dict[str, Any] = options | ({"text": prompt} if isinstance(prompt, str) else {"input_ids": prompt})
    body["sampling_params"] = {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}
    start = time.perf_counter()
    answer: dict[str, Any] = json.loads(server.post("/generate", body, timeout_s=120.0))
    return answer | {"seconds": time.perf_counter() - start}


def generate_all(
    server: RunningServer, prompts: Sequence[list[int]], count: int, clients: int | None = None
) -> tuple[float, list[dict[str, Any]]]:
    """Seconds for all answers, and the answers; ``clients`` ask at the same time (default: one for each prompt)."""
    start = time.perf_counter()
    with ThreadPoolExecutor(clients or len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: generate(server, prompt, count), prompts))
    return time.perf_counter() - start, answers


def cached(answer: dict[str, Any]) -> int:
    """Tokens of a prompt that were found in the cache."""
    return int(answer["meta_info"]["cached_tokens"])


def wait_until_idle(server: RunningServer, timeout_s: float = 10.0) -> None:
    """Wait until no request holds a slot: a prompt is compressed when its request has ended. Returns on stock."""
    end = time.monotonic() + timeout_s
    while any(state["protected_slots"] for state in plugin_states(server)):
        if time.monotonic() > end:
            raise TimeoutError(f"slots are still held {timeout_s:.0f} s after the last answer")
        time.sleep(0.1)


def margins(answer: dict[str, Any]) -> list[float]:
    """For each token of an answer, by how much the best token's log-probability exceeds the second best one's."""
    return [best[0] - second[0] for best, second in answer["meta_info"]["output_top_logprobs"]]


def agreement(outputs: Sequence[Output], others: Sequence[Output]) -> str:
    """How many answers are the same, and how close the others' two best tokens were where the first one differs.

    Rounding explains a difference where they were close: within a few hundredths for bfloat16.
    """
    close = []
    for (tokens, _), (expected, known) in zip(outputs, others, strict=True):
        differing = [i for i, pair in enumerate(zip(tokens, expected, strict=True)) if pair[0] != pair[1]]
        close += [known[i] for i in differing[:1]]
    same = f"{len(outputs) - len(close)} of {len(outputs)}"
    return same + (f"; the two best tokens were up to {max(close):.3f} apart where others differ" if close else "")


def recorded_outputs(path: Path | None) -> dict[str, list[Output]]:
    """Answers by system, from a file of rows."""
    lines = [] if path is None else path.read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["what"] == "answers"]
    return {row["system"]: row["outputs"] for row in rows}
