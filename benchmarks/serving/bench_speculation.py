"""Speculative decoding of answers that quote a shared document, compressed or not.

NGRAM drafts come from the documents, which every server loads as an external corpus; STANDALONE drafts from a draft
model. Acceptance lengths are counts, which do not depend on the machine's load; each repetition has another document.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from serving_bench.fleet import COMMON_FLAGS, Fleet, running
from serving_bench.options import LOGS, Recorder, parse_options
from serving_bench.page import Page, Table
from serving_bench.results import ROOT
from serving_bench.streams import stream_all
from serving_bench.texts import chosen_speeches, document, tokens_of

from kvevict_tools.launcher import FLOAT32_FLAGS, RunningServer, System, kvevict_system
from kvevict_tools.measure import flush, in_turn
from kvevict_tools.models import ensure_model

POOL_SLOTS = 8_000
DOCUMENT_TOKENS = 2_400
QUOTED = range(100, 2_300, 60)
"""Where the quoted passages begin in the handbook."""
SPARSE = 3
"""Decode is timed on every third of them, and acceptance measured on as many passages of each document."""
LEAD_TOKENS = 24
"""Tokens of a passage that are given; the answer goes on from there."""
ANSWER_TOKENS = 64
DRAFTS = 12
"""Of NGRAM; STANDALONE drafts a chain of three."""
BUDGETS = (0.5, 0.2, 0.1)
AT_ONCE = 4
"""Answers at a time while acceptance is counted."""
HANDBOOK = ROOT / "examples" / "data" / "station_handbook.txt"
FULL = "whole"
WITHOUT = "without drafts"
WITH = "NGRAM"


@dataclass(frozen=True)
class Acceptance:
    """Tokens per verification step of one algorithm.

    Attributes:
        algorithm: ``NGRAM`` or ``STANDALONE``.
        model: a name of ``kvevict_tools.models.MODELS``; empty: the model of ``--model``.
        draft: likewise, of ``STANDALONE``; empty: the model itself.
    """

    algorithm: str
    model: str = ""
    draft: str = ""

    @property
    def name(self) -> str:
        """As shown in tables."""
        draft = f" drafted by {self.draft}" if self.draft else ""
        return f"acceptance, {self.algorithm}" + (f", {self.model}{draft}" if self.model else "")


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


POINTS = (
    *(Acceptance("NGRAM"), Acceptance("STANDALONE")),
    *(Acceptance("NGRAM", "qwen-0.5b"), Acceptance("STANDALONE", "qwen-0.5b")),
    *(Acceptance("NGRAM", "qwen-1.5b"), Acceptance("STANDALONE", "qwen-1.5b", draft="qwen-0.5b")),
    *(Equality(), Decode(1), Decode(4)),
)

PAGE = Page(
    name="speculation",
    command="python benchmarks/serving/bench_speculation.py",
    summary=(
        f"Answers of {ANSWER_TOKENS} greedy tokens that go on with passages of a shared document of {DOCUMENT_TOKENS} "
        f"tokens. Acceptance: {len(QUOTED[::SPARSE])} passages a document; the first repetition has the station "
        f"handbook, the others State of the Union addresses. NGRAM: {DRAFTS} draft tokens a step, the documents as "
        "external corpus. STANDALONE: the model is its own draft model unless another is named, three tokens a step. "
        f"`{FULL}`: our attention with nothing compressed. Acceptance length: tokens per verification step. Texts at "
        f"budget 1.0 are compared in float32, with {len(QUOTED)} passages of the handbook."
    ),
    tables=(
        Table("acceptance_length", "Acceptance length, tokens per step"),
        Table("equal_texts_pct", "Answers with the text of the first system, percent", has_ratio=False, digits=0),
        Table("acceptance_on_equal_texts", f"Acceptance length on these, relative to `{FULL}`", has_ratio=False),
        Table("decode_tokens_per_s", "Decode at budget 0.2, tokens/s of all requests", digits=1, baseline=WITHOUT),
    ),
    baseline=FULL,
)
FLAGS = ("--max-total-tokens", str(POOL_SLOTS), *COMMON_FLAGS)


def flags_of(algorithm: str, draft: Path, corpus: Path, topk: int = 1) -> tuple[str, ...]:
    """Arguments of a server that speculates; STANDALONE drafts a tree if ``topk`` is above 1."""
    chosen = (*FLAGS, "--speculative-algorithm", algorithm)
    if algorithm == "STANDALONE":
        tree = ("--speculative-num-steps", "3", "--speculative-eagle-topk", str(topk))
        size = ("--speculative-num-draft-tokens", str(4 * topk))
        return (*chosen, "--speculative-draft-model-path", str(draft), *tree, *size)
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
        for name in options.chosen(list(points)):
            point = points[name]
            known = [HANDBOOK.read_text(encoding="utf-8")]
            if isinstance(point, Acceptance):
                known += chosen_speeches()[: options.repeats - 1]
            corpus.write_text("".join(json.dumps(text) + "\n" for text in known), encoding="utf-8")
            model = model_of(point, options.model)
            compared = systems(point, model, corpus)
            if isinstance(point, Decode):
                with running(compared, model, LOGS / PAGE.name, recorder.progress) as fleet:
                    decode(fleet, point, recorder)
            else:
                every = SPARSE if isinstance(point, Acceptance) else 1
                accept(compared, point.name, model, documents(model, known), every, recorder)
    recorder.close()


def model_of(point: Acceptance | Equality | Decode, given: Path) -> Path:
    """The folder of a point's model."""
    return ensure_model(point.model) if isinstance(point, Acceptance) and point.model else given


def documents(model: Path, texts: Sequence[str]) -> list[list[int]]:
    """Token ids: the handbook as other benchmarks have it, and the beginnings of the other texts.

    ValueError: a text is too short.
    """
    found = [document(model, 1, DOCUMENT_TOKENS)]
    for text in texts[1:]:
        found.append(tokens_of(model, text)[:DOCUMENT_TOKENS])
        if len(found[-1]) < DOCUMENT_TOKENS:
            raise ValueError(f"document: got {len(found[-1])} tokens; allowed: at least {DOCUMENT_TOKENS}")
    return found


def quoting(text: list[int], every: int) -> list[list[int]]:
    """Prompts that each go on with the beginning of a passage of ``text``, one of ``every`` passages."""
    return [[*text, *text[start : start + LEAD_TOKENS]] for start in QUOTED[::every]]


def systems(point: Acceptance | Equality | Decode, model: Path, corpus: Path) -> list[System]:
    """What a point compares; the first is the reference of texts."""
    if isinstance(point, Acceptance):
        flags = flags_of(point.algorithm, ensure_model(point.draft) if point.draft else model, corpus)
        found = [kvevict_system(FULL, {"policy": "none"}, flags)]
        return found + [kvevict_system(f"budget {b:g}", {"budget": b}, flags) for b in BUDGETS]
    ngram = flags_of("NGRAM", model, corpus)
    if isinstance(point, Decode):
        return [kvevict_system(WITHOUT, {}, FLAGS), kvevict_system(WITH, {}, ngram)]
    drafts = {"chains": flags_of("STANDALONE", model, corpus), "trees": flags_of("STANDALONE", model, corpus, topk=2)}
    compared = {WITHOUT: FLAGS, WITH: ngram, **drafts}
    return [kvevict_system(name, {"budget": 1.0}, (*flags, *FLOAT32_FLAGS)) for name, flags in compared.items()]


def accept(
    compared: Sequence[System], point: str, model: Path, texts: list[list[int]], every: int, recorder: Recorder
) -> None:
    """Acceptance and texts of each system in turn, a repetition a document; the first system is the reference."""
    wanted: list[list[Answer]] = []
    for system in compared:
        with running([system], model, LOGS / PAGE.name, recorder.progress) as fleet:
            found = [answers(fleet[system.name], text, quoting(text, every)) for text in texts]
        wanted = wanted or found
        for i in range(len(texts)):
            recorder.add(point, system.name, i + 1, compare(found[i], wanted[i]))


def answers(server: RunningServer, text: list[int], prompts: list[list[int]]) -> list[Answer]:
    """Answers to prompts that begin with ``text``, which is compressed before."""
    compress(server, text)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda prompt: generate(server, prompt, ANSWER_TOKENS), prompts))


def compare(found: list[Answer], wanted: list[Answer]) -> dict[str, float]:
    """Acceptance, and which answers are those of the reference."""
    equal = [i for i, answer in enumerate(found) if answer.tokens == wanted[i].tokens]
    metrics = {"equal_texts_pct": 100.0 * len(equal) / len(found)}
    if found[0].steps:
        metrics["acceptance_length"] = per_step(found)
    if equal and wanted[0].steps:
        of_full = per_step([wanted[i] for i in equal])
        metrics["acceptance_on_equal_texts"] = per_step([found[i] for i in equal]) / of_full
    return metrics


def decode(fleet: Fleet, point: Decode, recorder: Recorder) -> None:
    """Decode with and without drafts, in turn."""
    text = document(recorder.options.model, 1, DOCUMENT_TOKENS)
    prompts = quoting(text, SPARSE)

    def one(name: str, repetition: int) -> None:
        compress(fleet[name], text)
        speed = decode_speed(fleet[name], prompts[: 2 * point.sharers], point.sharers)
        recorder.add(point.name, name, repetition, {"decode_tokens_per_s": speed})

    in_turn(fleet, recorder.options.repeats, one)


def compress(server: RunningServer, text: list[int]) -> None:
    """Forget everything, also earlier answers; have the document compressed."""
    flush(server)
    generate(server, text, 0)


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
