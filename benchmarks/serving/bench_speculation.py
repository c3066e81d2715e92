"""Speculative decoding of answers that quote a shared document, compressed or not.

NGRAM drafts come from the document, which every server loads as an external corpus; STANDALONE drafts from the model
itself as its own draft model. Acceptance lengths are counts, which do not depend on the machine's load.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from serving_bench.fleet import COMMON_FLAGS, Fleet, running
from serving_bench.options import LOGS, Recorder, parse_options
from serving_bench.page import Page, Table
from serving_bench.results import ROOT
from serving_bench.streams import stream_all
from serving_bench.texts import document

from sgl_kvevict.launcher import RunningServer, System, kvevict_system
from sgl_kvevict.measure import alone, flush, in_turn, wait_until_scored

POOL_SLOTS = 8_000
DOCUMENT_TOKENS = 2_400
QUOTED = range(100, 2_300, 60)
"""Where the quoted passages begin in the document."""
TIMED = 3
"""Decode is timed on every third of them."""
LEAD_TOKENS = 24
"""Tokens of a passage that are given; the answer goes on from there."""
ANSWER_TOKENS = 64
DRAFTS = 12
"""Of NGRAM; STANDALONE drafts a chain of three."""
BUDGETS = (0.5, 0.2, 0.1)
AT_ONCE = 4
"""Answers at a time while acceptance is counted."""
FULL = "whole"
WITHOUT = "without drafts"
WITH = "NGRAM"


@dataclass(frozen=True)
class Acceptance:
    """Tokens per verification step of one algorithm."""

    algorithm: str

    @property
    def name(self) -> str:
        """As shown in tables."""
        return f"acceptance, {self.algorithm}"


@dataclass(frozen=True)
class Equality:
    """Texts at budget 1.0 in float32, with and without drafts: the same."""

    name: str = "texts at budget 1.0"


@dataclass(frozen=True)
class Decode:
    """How many requests quote at once while decode is timed."""

    sharers: int

    @property
    def name(self) -> str:
        """As shown in tables."""
        return "decode, one request" if self.sharers == 1 else f"decode, {self.sharers} requests at once"


POINTS = (Acceptance("NGRAM"), Acceptance("STANDALONE"), Equality(), Decode(1), Decode(4))

PAGE = Page(
    name="speculation",
    command="python benchmarks/serving/bench_speculation.py",
    summary=(
        f"Answers of {ANSWER_TOKENS} greedy tokens that go on with {len(QUOTED)} passages of a shared document of "
        f"{DOCUMENT_TOKENS} tokens. NGRAM: {DRAFTS} draft tokens a step, the document as external corpus. STANDALONE: "
        f"the model is its own draft model, three tokens a step. `{FULL}`: our attention with nothing compressed. "
        "Acceptance length: tokens per verification step. Texts at budget 1.0 are compared in float32."
    ),
    tables=(
        Table("acceptance_length", "Acceptance length, tokens per step"),
        Table("equal_texts", f"Answers with the text of the first system, of {len(QUOTED)}", has_ratio=False, digits=0),
        Table("acceptance_on_equal_texts", f"Acceptance length on these, relative to `{FULL}`", has_ratio=False),
        Table("decode_tokens_per_s", "Decode at budget 0.2, tokens/s of all requests", digits=1, baseline=WITHOUT),
    ),
    baseline=FULL,
)
FLAGS = ("--max-total-tokens", str(POOL_SLOTS), *COMMON_FLAGS)


def flags_of(algorithm: str, model: Path, corpus: Path, topk: int = 1) -> tuple[str, ...]:
    """Arguments of a server that speculates; STANDALONE drafts a tree if ``topk`` is above 1."""
    chosen = (*FLAGS, "--speculative-algorithm", algorithm)
    if algorithm == "STANDALONE":
        tree = ("--speculative-num-steps", "3", "--speculative-eagle-topk", str(topk))
        size = ("--speculative-num-draft-tokens", str(4 * topk))
        return (*chosen, "--speculative-draft-model-path", str(model), *tree, *size)
    return (
        *(*chosen, "--speculative-num-draft-tokens", str(DRAFTS)),
        *("--speculative-ngram-external-corpus-path", str(corpus)),
        *("--speculative-ngram-external-sam-budget", str(DRAFTS - 4)),
    )


def main() -> None:
    """Run the benchmark."""
    options = parse_options(__doc__ or "")
    points = {point.name: point for point in POINTS}
    recorder = Recorder(PAGE, options, list(points))
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus.jsonl"
        text = (ROOT / "examples" / "data" / "station_handbook.txt").read_text(encoding="utf-8")
        corpus.write_text(json.dumps(text) + "\n", encoding="utf-8")
        for name in options.chosen(list(points)):
            point = points[name]
            compared = systems(point, options.model, corpus)
            with running(compared, options.model, LOGS / PAGE.name, recorder.progress) as fleet:
                if isinstance(point, Decode):
                    decode(fleet, point, recorder)
                else:
                    accept(fleet, point.name, recorder)
    recorder.close()


def systems(point: Acceptance | Equality | Decode, model: Path, corpus: Path) -> list[System]:
    """What a point compares; the first is the reference of texts."""
    if isinstance(point, Acceptance):
        flags = flags_of(point.algorithm, model, corpus)
        found = [kvevict_system(FULL, {"policy": "none"}, flags)]
        return found + [kvevict_system(f"budget {b:g}", {"budget": b}, flags) for b in BUDGETS]
    ngram = flags_of("NGRAM", model, corpus)
    if isinstance(point, Decode):
        return [kvevict_system(WITHOUT, {}, FLAGS), kvevict_system(WITH, {}, ngram)]
    drafts = {"chains": flags_of("STANDALONE", model, corpus), "trees": flags_of("STANDALONE", model, corpus, topk=2)}
    compared = {WITHOUT: FLAGS, WITH: ngram, **drafts}
    return [kvevict_system(name, {"budget": 1.0}, (*flags, "--dtype", "float32")) for name, flags in compared.items()]


def accept(fleet: Fleet, point: str, recorder: Recorder) -> None:
    """Acceptance and texts on all servers, once: they are counts."""
    text, prompts = texts(recorder.options.model)
    wanted: list[Answer] = []
    for name, server in fleet.items():
        with alone(server, fleet.values()):
            compress(server, text)
            with ThreadPoolExecutor(AT_ONCE) as pool:
                found = list(pool.map(lambda prompt: generate(server, prompt, ANSWER_TOKENS), prompts))  # noqa: B023
        wanted = wanted or found
        equal = [i for i, answer in enumerate(found) if answer.tokens == wanted[i].tokens]
        metrics = {"equal_texts": float(len(equal))}
        if found[0].steps:
            metrics["acceptance_length"] = per_step(found)
        if equal and wanted[0].steps:
            of_full = per_step([wanted[i] for i in equal])
            metrics["acceptance_on_equal_texts"] = per_step([found[i] for i in equal]) / of_full
        recorder.add(point, name, 1, metrics)


def decode(fleet: Fleet, point: Decode, recorder: Recorder) -> None:
    """Decode with and without drafts, in turn."""
    text, prompts = texts(recorder.options.model)

    def one(name: str, repetition: int) -> None:
        compress(fleet[name], text)
        speed = decode_speed(fleet[name], prompts[::TIMED][: 2 * point.sharers], point.sharers)
        recorder.add(point.name, name, repetition, {"decode_tokens_per_s": speed})

    in_turn(fleet, recorder.options.repeats, one)


def texts(model: Path) -> tuple[list[int], list[list[int]]]:
    """The document, and prompts that each go on with the beginning of a passage."""
    text = document(model, 1, DOCUMENT_TOKENS)
    return text, [[*text, *text[start : start + LEAD_TOKENS]] for start in QUOTED]


def compress(server: RunningServer, text: list[int]) -> None:
    """Forget everything, also earlier answers; cache the document and wait until it is compressed."""
    flush(server)
    generate(server, text, 0)
    wait_until_scored(server)


@dataclass(frozen=True)
class Answer:
    """One answer: its tokens, and verification steps."""

    tokens: list[int]
    steps: int


def generate(server: RunningServer, input_ids: list[int], max_new_tokens: int) -> Answer:
    """Run one greedy request."""
    sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
    answer = json.loads(server.post("/generate", {"input_ids": input_ids, "sampling_params": sampling}))
    info: Mapping[str, int] = answer["meta_info"]
    return Answer(answer["output_ids"], info.get("spec_verify_ct", 0))


def per_step(answers: list[Answer]) -> float:
    """Tokens per verification step."""
    return sum(len(answer.tokens) for answer in answers) / sum(answer.steps for answer in answers)


def decode_speed(server: RunningServer, prompts: list[list[int]], sharers: int) -> float:
    """Tokens per second after the first ones, of ``sharers`` answers at a time."""
    tokens = seconds = 0.0
    for first in range(0, len(prompts) - sharers + 1, sharers):
        streams = stream_all(server.url, prompts[first : first + sharers], ANSWER_TOKENS)
        begin = max(stream.arrivals[0][0] for stream in streams)
        late = [[arrival for arrival in stream.arrivals if arrival[0] >= begin] for stream in streams]
        tokens += sum(arrivals[-1][1] - arrivals[0][1] for arrivals in late)
        seconds += max(arrivals[-1][0] for arrivals in late) - begin
    return tokens / seconds


if __name__ == "__main__":
    main()
