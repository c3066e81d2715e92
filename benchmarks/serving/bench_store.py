"""What a store of prefixes, and the host's memory, save and cost, in the default configuration.

The store: after a restart, while it is written to, and when far more prefixes are asked about than the pool can hold.
A server compresses documents and is stopped. Two others are asked about them, one with its store, one without. Then
servers with and without a store take turns round by round, and are asked the same questions. The host's memory: a
document is asked about again after others have pushed it out of the pool.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving_bench.fleet import COMMON_FLAGS, Fleet, flush_all, running
from serving_bench.needles import Needles, figures, rounds
from serving_bench.options import LOGS, Recorder, parse_options
from serving_bench.page import HIT_RATE, REQUESTS, Page, Table
from serving_bench.streams import Stream, stream_all
from serving_bench.texts import document, question

from kvevict_kernels.row_sizes import STEP_BYTES
from kvevict_tools.launcher import System, kvevict_system
from kvevict_tools.measure import in_turn, plugin_state
from sgl_kvevict import client
from sgl_kvevict.store.segment_file import read_header

RESTART = "a document of 2,800 tokens, after a restart"
WRITING = "2x the pool, new documents all the time"
LARGE = "8x the pool"
DROPPED = "a document of 2,800 tokens, after it left the pool"
HOST = "host memory"
WITHOUT, WITH, WRITING_ONLY = "no store", "store", "store, written only"
DOCUMENT_TOKENS = 2800
RESTART_POOL = 20_000
DROPPED_POOL = 3_200
POOL_SLOTS = 4096
CONTEXT_TOKENS = 1024
CONCURRENCY = 2
LARGE_ROUND = 16
ANSWER_TOKENS = 16

COUNTERS = {"stored": "stored_segments", "loaded": "loaded_segments", "late": "late_loads"}
"""Columns, and the totals of `/server_info` that they show."""
PAGE = Page(
    name="store",
    command="python benchmarks/serving/bench_store.py",
    summary=(
        f"The default configuration, with a store in a folder and without. After a restart: the first question on each "
        f"document of {DOCUMENT_TOKENS:,} tokens, which another server had compressed (warm) and was stopped; the same "
        "answers are those that are, token for token, what that server had said. The rest: contexts of "
        f"{CONTEXT_TOKENS:,} tokens with needles, {CONCURRENCY} questions at a time, a pool of {POOL_SLOTS:,} token "
        f"slots. At 2x the pool each repetition has contexts of its own, each asked about twice, so that segments are "
        f"written all the time; at 8x every repetition asks {LARGE_ROUND} questions, every context once before any "
        "comes again, after all were shown once. A document that left the pool: asked about again when later ones have "
        f"taken its place (a pool of {DROPPED_POOL:,}), found in the host's memory or computed "
        "again; a load is the host time of look-up and copy, beside the time to the first token when the same server "
        "computed the document."
    ),
    tables=(
        Table("ttft_ms", "First token, ms", digits=0),
        Table("same_answers_pct", "Answers as before the restart, %", has_ratio=False, digits=0),
        Table("bytes_pct", "Bytes stored of a document, % of its full KV", has_ratio=False, digits=1),
        Table("load_pct", "A load, % of the time to compute it", has_ratio=False, digits=2),
        REQUESTS,
        HIT_RATE,
        Table("needle_score", "Needle score", has_ratio=False),
        Table("stored", "Segments written", has_ratio=False, digits=0),
        Table("loaded", "Segments loaded", has_ratio=False, digits=0),
    ),
    baseline=WITHOUT,
)


def system(name: str, pool: int, store: Path | None, **config: Any) -> System:
    """Ours, with a store or without; only ``HOST`` has the host's memory, which would have the same prefixes."""
    config = {**config} if name == HOST else {"host_bytes": 0, **config}
    given = config if store is None else {**config, "store": str(store)}
    return kvevict_system(name, given, ("--max-total-tokens", str(pool), *COMMON_FLAGS))


def main() -> None:
    """Run the benchmark."""
    options = parse_options(__doc__ or "")
    points = [RESTART, DROPPED, WRITING, LARGE]
    recorder = Recorder(PAGE, options, points)
    chosen = options.chosen(points)
    with tempfile.TemporaryDirectory() as folder:
        if RESTART in chosen:
            measure_restart(Path(folder) / "restart", recorder)
        if DROPPED in chosen:
            measure_dropped(recorder)
        if WRITING in chosen or LARGE in chosen:
            systems = [
                system(WITHOUT, POOL_SLOTS, None),
                system(WRITING_ONLY, POOL_SLOTS, Path(folder) / "written", store_wait_ms=0),
                system(WITH, POOL_SLOTS, Path(folder) / "used"),
            ]
            needles = Needles(options.model, CONTEXT_TOKENS)
            with running(systems, options.model, LOGS / PAGE.name, recorder.progress) as fleet:
                if WRITING in chosen:
                    measure_writing(fleet, needles, recorder)
                if LARGE in chosen:
                    measure_large(fleet, needles, recorder)
    recorder.close()


@dataclass(frozen=True)
class Before:
    """What the server said that was stopped.

    Attributes:
        prompt: document and question.
        answer: token ids.
    """

    prompt: list[int]
    answer: tuple[int, ...]


def measure_restart(store: Path, recorder: Recorder) -> None:
    """One document a repetition."""
    options = recorder.options
    before = compress(store, recorder)
    shares = [share_of_full(path) for path in sorted(store.rglob("segments/*/*"))]
    pool = RESTART_POOL
    systems, logs = [system(WITHOUT, pool, None), system(WITH, pool, store)], LOGS / PAGE.name / "restarted"
    with running(systems, options.model, logs, recorder.progress) as fleet:
        for server in fleet.values():
            ask(server.url, [question(options.model, 0)])  # the first request of all

        def one(name: str, repetition: int) -> None:
            asked = before[repetition - 1]
            (answered,) = ask(fleet[name].url, [asked.prompt])
            metrics = {"ttft_ms": 1e3 * answered.ttft_s, "cached_tokens": float(answered.cached_tokens)}
            if name == WITH:
                metrics["same_answers_pct"] = 100.0 * (answered.output_ids == asked.answer)
                metrics["bytes_pct"] = 100 * shares[repetition - 1]
            recorder.add(RESTART, name, repetition, metrics)

        in_turn(fleet, options.repeats, one)


def compress(store: Path, recorder: Recorder) -> list[Before]:
    """Have documents compressed and stored, ask one question on each, and stop the server."""
    options = recorder.options
    found = []
    systems, logs = [system(WITH, RESTART_POOL, store)], LOGS / PAGE.name / "first"
    with running(systems, options.model, logs, recorder.progress) as fleet:
        server = fleet[WITH]
        for number in range(options.repeats):
            text = document(options.model, number, DOCUMENT_TOKENS)
            client.warm(server.url, input_ids=text)
            prompt = [*text, *question(options.model, number)]
            (answered,) = ask(server.url, [prompt])
            found.append(Before(prompt, answered.output_ids))
        while counters(fleet, WITH)["stored"] < options.repeats:
            time.sleep(0.1)
    return found


def measure_dropped(recorder: Recorder) -> None:
    """One document a repetition, asked about again when all documents were asked about once."""
    options = recorder.options
    prompts = [
        [*document(options.model, number, DOCUMENT_TOKENS), *question(options.model, number)]
        for number in range(options.repeats)
    ]
    systems = [system(name, DROPPED_POOL, None) for name in (WITHOUT, HOST)]
    with running(systems, options.model, LOGS / PAGE.name / "dropped", recorder.progress) as fleet:
        for server in fleet.values():
            ask(server.url, [question(options.model, 0)])  # the first request of all
        computed = [ask(fleet[HOST].url, [prompt])[0].ttft_s for prompt in prompts]
        for prompt in prompts:
            ask(fleet[WITHOUT].url, [prompt])

        def one(name: str, repetition: int) -> None:
            before = plugin_state(fleet[name])
            (answered,) = ask(fleet[name].url, [prompts[repetition - 1]])
            after = plugin_state(fleet[name])
            metrics = {"ttft_ms": 1e3 * answered.ttft_s, "cached_tokens": float(answered.cached_tokens)}
            if before and after and after["moved_in_segments"] > before["moved_in_segments"]:
                seconds = after["moved_in_seconds"] - before["moved_in_seconds"]
                metrics["load_pct"] = 100 * seconds / computed[repetition - 1]
            recorder.add(DROPPED, name, repetition, metrics)

        in_turn(fleet, options.repeats, one)


def measure_writing(fleet: Fleet, needles: Needles, recorder: Recorder) -> None:
    """New contexts in every repetition, each asked about twice."""
    repeats, size = recorder.options.repeats, 2 * POOL_SLOTS // CONTEXT_TOKENS

    def one(name: str, repetition: int) -> None:
        contexts = needles.contexts(size, 1000 + repetition * size)
        first, second = rounds(contexts, [size] * 2)
        measure_round(fleet, name, WRITING, repetition, needles, [*first, *second], recorder)

    flush_all(fleet)
    in_turn(fleet, repeats, one, [WITHOUT, WRITING_ONLY])


def measure_large(fleet: Fleet, needles: Needles, recorder: Recorder) -> None:
    """The same contexts in every repetition, more than the pool holds."""
    repeats, size = recorder.options.repeats, 8 * POOL_SLOTS // CONTEXT_TOKENS
    asked = rounds(needles.contexts(size, 0), [LARGE_ROUND] * (size // LARGE_ROUND + repeats))
    shown, asked = asked[: size // LARGE_ROUND], asked[size // LARGE_ROUND :]
    flush_all(fleet)
    for name in (WITHOUT, WITH):
        recorder.progress(f"{LARGE}: showing {size} contexts to {name}")
        for part in shown:
            needles.ask(fleet[name].url, part, CONCURRENCY)

    def one(name: str, repetition: int) -> None:
        measure_round(fleet, name, LARGE, repetition, needles, asked[repetition - 1], recorder)

    in_turn(fleet, repeats, one, [WITHOUT, WITH])


def measure_round(
    fleet: Fleet, name: str, point: str, repetition: int, needles: Needles, asked: Sequence[Any], recorder: Recorder
) -> None:
    """Questions to one server; what it wrote and loaded meanwhile."""
    before = counters(fleet, name)
    answers, seconds = needles.ask(fleet[name].url, asked, CONCURRENCY)
    after = counters(fleet, name)
    used = {key: float(after[key] - before[key]) for key in COUNTERS if name != WITHOUT}
    recorder.add(point, name, repetition, figures(answers, seconds) | used)


def counters(fleet: Fleet, name: str) -> dict[str, Any]:
    """Totals of a server's store, by their column; none of stock SGLang."""
    state = plugin_state(fleet[name])
    return {} if state is None else {column: state[total] for column, total in COUNTERS.items()}


def ask(url: str, prompts: Sequence[Sequence[int]]) -> list[Stream]:
    """Answers of a fixed length."""
    return stream_all(url, prompts, ANSWER_TOKENS)


def share_of_full(path: Path) -> float:
    """Bytes of a stored segment with rows of 4 bits, against those of all keys and values of its tokens."""
    header = read_header(path.read_bytes())
    num_layers, num_heads = header["tensors"]["rows.keep_lens"][1]
    _, (_, width) = header["tensors"]["rows.k"]
    head_dim, num_tokens = 2 * (width - STEP_BYTES), header["end"] - header["start"]
    return float(path.stat().st_size / (num_tokens * num_layers * num_heads * 2 * head_dim * 2))


if __name__ == "__main__":
    main()
