"""Coding agents of recorded lengths, 1/32 as long, beside a pool of a quarter of what they have: hits and answers.

Needles are planted in the outputs of tools, and every request asks for one. Requests/s: agents send one request after
the other, stock and ours in turn. Every question: new agents in every repetition, asked about all their needles.
Drafts: the same prompts on tiny models, one of which has an EAGLE draft model; only found tokens are counted.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from serving_bench.agents import Agent, make_agents, turn_of
from serving_bench.fleet import COMMON_FLAGS, Fleet, compared_systems, flush_all, running
from serving_bench.needles import Needles, figures
from serving_bench.options import LOGS, Recorder, parse_options
from serving_bench.page import REQUESTS, Page, Table
from serving_bench.results import ROOT
from serving_bench.streams import Stream, stream_all

from kvevict_tools.launcher import kvevict_system
from kvevict_tools.measure import alone, flush, in_turn

sys.path.append(str(ROOT / "tests"))

POOL_SLOTS = 4608
MULTIPLE = 4
CONCURRENCY = 2
TURNS = f"{MULTIPLE}x the pool"
COLD = f"{TURNS}, cold start"
EVERY = f"{TURNS}, every question"
DRAFTS = f"{TURNS}, drafts"
NONE = "none"
SEED = 1
"""Of the agents whose requests are timed; every repetition of `EVERY` has the next one."""
ALGORITHMS = {
    "NGRAM": ("--speculative-num-draft-tokens", "8"),
    "EAGLE": (
        *("--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"),
        "--speculative-draft-model-path",
    ),
}
TINY_ANSWER = 8
TINY_POLICY = "ada-snapkv"
WITHOUT = "without drafts"

PAGE = Page(
    name="agents",
    command="python benchmarks/serving/bench_agents.py",
    summary=(
        "Recorded conversations of coding agents ([callanjfox/kv-cache-tester](https://github.com/callanjfox/"
        "kv-cache-tester), WEKA, Apache-2.0; lengths only), 1/32 as long, with prose and needles in place of the text. "
        f"So many agents that their last prompts together are {MULTIPLE} times the pool of {POOL_SLOTS:,} token slots, "
        f"each met at a random request; {CONCURRENCY} requests at a time. A request is the agent's next prompt and a "
        f"question, which is not part of the prompt after it. `{COLD}`: the first request of each, into an empty "
        f"cache. `{EVERY}`: new agents in every repetition; after a first request each, all questions about the next "
        f"prompt. `{DRAFTS}`: tiny random models, policy `{TINY_POLICY}`. `{NONE}`: ours with nothing compressed. The "
        "needle score is the share of the values asked for that the answers contain."
    ),
    tables=(
        REQUESTS,
        Table("needle_score", "Needle score", baseline=NONE),
        Table("hit_rate_pct", "Prompt tokens found in the cache, %", has_ratio=False, digits=1),
        Table("answer_s", "Whole answer, median s"),
    ),
)


def main() -> None:
    """Run the benchmark; ``--repeats`` is the number of turns after the first, and of samples of agents."""
    options = parse_options(__doc__ or "")
    recorder = Recorder(PAGE, options, [TURNS, COLD, EVERY, DRAFTS])
    needles = Needles(options.model)
    chosen = options.chosen([TURNS, EVERY, DRAFTS])
    systems = compared_systems(POOL_SLOTS, has_none=True, beside=options.beside)
    if TURNS in chosen:
        with running(systems, options.model, LOGS / PAGE.name, recorder.progress) as fleet:
            measure_turns(fleet, needles, recorder)
    if EVERY in chosen:
        with running(systems[1:], options.model, LOGS / PAGE.name, recorder.progress) as fleet:
            measure_answers(fleet, needles, recorder)
    if DRAFTS in chosen:
        measure_drafts(agents_of(SEED, needles, recorder, options.repeats + 1), recorder)
    recorder.close()


def agents_of(seed: int, needles: Needles, recorder: Recorder, num_turns: int) -> list[Agent]:
    """A sample of agents whose prompts are :data:`MULTIPLE` times the pool."""
    agents = make_agents(needles.prompts, seed, MULTIPLE * POOL_SLOTS, num_turns)
    lengths = sorted(len(agent.turns[0].ids) for agent in agents)
    recorder.progress(f"sample {seed}: {len(agents)} agents, {lengths[0]:,} to {lengths[-1]:,} tokens at first")
    return agents


def measure_turns(fleet: Fleet, needles: Needles, recorder: Recorder) -> None:
    """All agents' next requests in each repetition, on all servers in turn."""
    repeats = recorder.options.repeats
    agents = agents_of(SEED, needles, recorder, repeats + 1)

    def one(name: str, turn: int) -> None:
        asked = turn_of(agents, turn)
        recorder.add(
            TURNS if turn else COLD, name, max(turn, 1), figures(*needles.ask(fleet[name].url, asked, CONCURRENCY))
        )

    flush_all(fleet)
    for name, server in fleet.items():
        with alone(server, fleet.values()):
            one(name, 0)
    in_turn(fleet, repeats, one)


def measure_answers(fleet: Fleet, needles: Needles, recorder: Recorder) -> None:
    """All questions to new agents in each repetition."""

    def one(name: str, repetition: int) -> None:
        flush(fleet[name])
        agents = agents_of(SEED + repetition - 1, needles, recorder, 2)
        needles.ask(fleet[name].url, turn_of(agents, 0), CONCURRENCY)
        answers, seconds = needles.ask(fleet[name].url, turn_of(agents, 1, all_questions=True), CONCURRENCY)
        found = figures(answers, seconds)
        recorder.add(EVERY, name, repetition, {key: found[key] for key in ("needle_score", "hit_rate_pct")})

    in_turn(fleet, recorder.options.repeats, one)


def measure_drafts(agents: list[Agent], recorder: Recorder) -> None:
    """Tokens that the agents' requests find with drafts and without, on tiny random models.

    The policy is one that needs no learned scores: learning them takes longer than the measurement.
    """
    from helpers.draft_models import save_eagle, save_target
    from helpers.tiny_model import VOCAB_SIZE

    flags = ("--max-total-tokens", str(POOL_SLOTS), "--context-length", "8192", *COMMON_FLAGS)
    env = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}  # the tiny model has 4,096 tokens and no right answers
    with tempfile.TemporaryDirectory() as folder:
        target = save_target(Path(folder) / "target")
        draft = save_eagle(Path(folder) / "draft", target)
        config = {"policy": TINY_POLICY}
        compared = [kvevict_system(WITHOUT, config, flags, env)]
        for name, more in ALGORITHMS.items():
            drafts = (*more, *((str(draft),) if name == "EAGLE" else ()))
            compared.append(kvevict_system(name, config, (*flags, "--speculative-algorithm", name, *drafts), env))
        with running(compared, target, LOGS / PAGE.name, recorder.progress) as fleet:
            for name, server in fleet.items():
                for turn in range(recorder.options.repeats + 1):
                    streams: list[Stream] = []
                    prompts = [[3 + i % (VOCAB_SIZE - 3) for i in agent.turns[turn].ids] for agent in agents]
                    for first in range(0, len(prompts), CONCURRENCY):
                        streams += stream_all(server.url, prompts[first : first + CONCURRENCY], TINY_ANSWER)
                    found = sum(each.cached_tokens for each in streams) / sum(each.prompt_tokens for each in streams)
                    if turn:
                        recorder.add(DRAFTS, name, turn, {"hit_rate_pct": 100 * found})


if __name__ == "__main__":
    main()
