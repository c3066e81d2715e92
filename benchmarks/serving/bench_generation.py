"""Decode speed and slots of one long answer, compressed while it is generated or not.

Compressed answers are generated to their end, and timed over their last tokens. For the other systems, which are slow
and keep every token anyway, all but these last tokens are given as the prompt: what a step reads is the same.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from serving_bench.fleet import COMMON_FLAGS, Fleet, flush_all, running
from serving_bench.options import LOGS, Recorder, parse_options
from serving_bench.page import Page, Table
from serving_bench.streams import Stream, stream_all
from serving_bench.texts import document
from serving_bench.watch import most_slots

from kvevict_tools.launcher import System, kvevict_system, stock_system
from kvevict_tools.measure import in_turn

POOL_SLOTS = 6_000
PROMPT_TOKENS = 512
BLOCK = 256
LAST_TOKENS = 64
"""Tokens that are timed."""
POLICIES = ("h2o", "streaming-llm")
BUDGET = 0.25


@dataclass(frozen=True)
class Point:
    """One length of the answer (tokens)."""

    tokens: int

    @property
    def name(self) -> str:
        """As shown in tables."""
        return f"{self.tokens} generated"


POINTS = (Point(1024), Point(4096))
QUICK = (Point(1024),)

PAGE = Page(
    name="generation",
    command="python benchmarks/serving/bench_generation.py",
    summary=(
        f"One answer to a prompt of {PROMPT_TOKENS} tokens. `h2o` and `streaming-llm`: budget {BUDGET:g}, "
        f"`decode_block` {BLOCK}. `whole`: our attention backend with nothing compressed, so what the others gain "
        f"beyond it is compression's. Timed are the last {LAST_TOKENS} tokens; stock and `whole` get all tokens before "
        "them as a prompt. Slots are the most that were not free, prompt included; SGLang refreshes that gauge every "
        "40 steps."
    ),
    tables=(
        Table("decode_tokens_per_s", "Decode at the answer's end, tokens/s", digits=1),
        Table("slots", "Token slots held at most", digits=0),
        Table("all_tokens_per_s", "Tokens/s over the whole answer", has_ratio=False, digits=1),
    ),
)


def systems() -> list[System]:
    """What is compared."""
    flags = ("--max-total-tokens", str(POOL_SLOTS), *COMMON_FLAGS)
    found = [stock_system("stock", flags), kvevict_system("whole", {"policy": "none"}, flags)]
    config = {"budget": BUDGET, "decode_block": BLOCK}
    return found + [kvevict_system(policy, {"policy": policy, **config}, flags) for policy in POLICIES]


def main() -> None:
    """Run the benchmark."""
    options = parse_options(__doc__ or "")
    points = {point.name: point for point in (QUICK if options.quick else POINTS)}
    recorder = Recorder(PAGE, options, list(points))
    with running(systems(), options.model, LOGS / PAGE.name, recorder.progress) as fleet:
        for name in options.chosen(list(points)):
            measure(fleet, points[name], recorder)
    recorder.close()


def measure(fleet: Fleet, point: Point, recorder: Recorder) -> None:
    """One length on all servers."""
    model = recorder.options.model

    def one(name: str, repetition: int) -> None:
        text = document(model, repetition, PROMPT_TOKENS + point.tokens)
        is_compressed = name in POLICIES
        num_given = PROMPT_TOKENS if is_compressed else len(text) - LAST_TOKENS
        flush_all({name: fleet[name]})
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(stream_all, fleet[name].url, [text[:num_given]], len(text) - num_given)
            slots = most_slots(fleet[name], asked)
        (stream,) = asked.result()
        found = {"decode_tokens_per_s": speed(stream, LAST_TOKENS), "slots": float(slots)}
        if is_compressed:
            found["all_tokens_per_s"] = speed(stream, point.tokens)
        recorder.add(point.name, name, repetition, found)

    in_turn(fleet, recorder.options.repeats, one)


def speed(stream: Stream, num_tokens: int) -> float:
    """Tokens per second over the last ``num_tokens`` of an answer, the first left out."""
    last_moment, last = stream.arrivals[-1]
    moment, first = next(arrival for arrival in stream.arrivals if arrival[1] > last - num_tokens)
    return (last - first) / (last_moment - moment)


if __name__ == "__main__":
    main()
