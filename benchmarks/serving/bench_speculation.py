"""Speculative decoding (NGRAM) of answers that quote a shared document, compressed or not.

Drafts come from the document, which every server loads as an external corpus; a flush forgets earlier answers.
Acceptance lengths are counts, which do not depend on the machine's load.
"""

from __future__ import annotations

import json
import tempfile
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
from sgl_kvevict.measure import flush, in_turn

POOL_SLOTS = 8_000
DOCUMENT_TOKENS = 2_400
QUOTED = (300, 700, 1_100, 1_500, 1_900)
"""Where the quoted passages begin in the document."""
LEAD_TOKENS = 24
"""Tokens of a passage that are given; the answer goes on from there."""
ANSWER_TOKENS = 64
DRAFTS = 12
BUDGETS = (0.5, 0.2, 0.1)
FULL = "whole"
WITHOUT = "without drafts"


@dataclass(frozen=True)
class Point:
    """How many requests quote at once."""

    sharers: int

    @property
    def name(self) -> str:
        """As shown in tables."""
        return "one request" if self.sharers == 1 else f"{self.sharers} requests at once"


POINTS = (Point(1), Point(4))

PAGE = Page(
    name="speculation",
    command="python benchmarks/serving/bench_speculation.py",
    summary=(
        f"Answers of {ANSWER_TOKENS} greedy tokens that go on with passages of a shared document of {DOCUMENT_TOKENS} "
        f"tokens, {DRAFTS} draft tokens a step (NGRAM, the document as external corpus). `{FULL}`: our attention with "
        f"nothing compressed; `{WITHOUT}`: budget 0.2 without speculation. Acceptance length: tokens per verification "
        "step."
    ),
    tables=(
        Table("acceptance_length", "Acceptance length, tokens per step"),
        Table("decode_tokens_per_s", "Decode, tokens/s of all requests", digits=1),
    ),
    baseline=FULL,
)


def systems(corpus: Path) -> list[System]:
    """What is compared."""
    flags = ("--max-total-tokens", str(POOL_SLOTS), *COMMON_FLAGS)
    ngram = (
        *("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", str(DRAFTS)),
        *("--speculative-ngram-external-corpus-path", str(corpus)),
        *("--speculative-ngram-external-sam-budget", str(DRAFTS - 4)),
    )
    found = [kvevict_system(FULL, {"policy": "none"}, (*flags, *ngram))]
    found += [kvevict_system(f"budget {b:g}", {"budget": b, **POLICY}, (*flags, *ngram)) for b in BUDGETS]
    return [*found, kvevict_system(WITHOUT, {"budget": 0.2, **POLICY}, flags)]


POLICY = {"policy": "ada-snapkv"}
"""Compresses at the first prompt, so that no scoring pass has to be waited for."""


def main() -> None:
    """Run the benchmark."""
    options = parse_options(__doc__ or "")
    points = {point.name: point for point in POINTS}
    recorder = Recorder(PAGE, options, list(points))
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus.jsonl"
        text = (ROOT / "examples" / "data" / "station_handbook.txt").read_text(encoding="utf-8")
        corpus.write_text(json.dumps(text) + "\n", encoding="utf-8")
        with running(systems(corpus), options.model, LOGS / PAGE.name, recorder.progress) as fleet:
            for name in options.chosen(list(points)):
                measure(fleet, points[name], recorder)
    recorder.close()


def measure(fleet: Fleet, point: Point, recorder: Recorder) -> None:
    """One number of sharers on all servers."""
    text = document(recorder.options.model, 1, DOCUMENT_TOKENS)
    prompts = [[*text, *text[start : start + LEAD_TOKENS]] for start in QUOTED]

    def one(name: str, repetition: int) -> None:
        server, found = fleet[name], {}
        if name != WITHOUT:
            compress(server, text)
            found["acceptance_length"] = acceptance(server, prompts, point.sharers)
        compress(server, text)
        found["decode_tokens_per_s"] = decode_speed(server, prompts, point.sharers)
        recorder.add(point.name, name, repetition, found)

    in_turn(fleet, recorder.options.repeats, one)


def compress(server: RunningServer, text: list[int]) -> None:
    """Forget everything, and cache the document."""
    flush(server)
    generate(server, text, 0)


def generate(server: RunningServer, input_ids: list[int], max_new_tokens: int) -> dict[str, float]:
    """Run one greedy request; returns SGLang's ``meta_info``."""
    sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
    answer = json.loads(server.post("/generate", {"input_ids": input_ids, "sampling_params": sampling}))
    info: dict[str, float] = answer["meta_info"]
    return info


def acceptance(server: RunningServer, prompts: list[list[int]], sharers: int) -> float:
    """Tokens per verification step over all answers."""
    with ThreadPoolExecutor(sharers) as pool:
        infos = list(pool.map(lambda prompt: generate(server, prompt, ANSWER_TOKENS), prompts))
    return sum(info["completion_tokens"] for info in infos) / sum(info["spec_verify_ct"] for info in infos)


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
