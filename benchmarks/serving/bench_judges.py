"""What programs that know nothing of this package say of stock SGLang and of the default configuration.

``cache-pressure`` (PyPI) counts contexts that a server finds again; SGLang's ``bench_serving`` sends shared prefixes,
and prompts that share nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from serving_bench.fleet import Fleet, compared_systems, flush_all, running
from serving_bench.options import LOGS, Recorder, parse_options
from serving_bench.page import FIRST_TOKEN, HIT_RATE, REQUESTS, Page, Table
from serving_bench.results import ROOT

from kvevict_tools.launcher import RunningServer
from kvevict_tools.measure import alone, in_turn

POOL_SLOTS = 8192
CONCURRENCY = 2
CONTEXTS = 30
PRESSURE = (
    *(".venv-cache-pressure/bin/cache-pressure", "--kv-size", str(POOL_SLOTS)),
    *("--context-tokens", "1000", "--num-contexts", str(CONTEXTS)),
)
"""3.7 times the pool."""
BENCH_SERVING = (
    *("python", "-m", "sglang.bench_serving", "--backend", "sglang", "--cache-report"),
    *("--max-concurrency", str(CONCURRENCY), "--warmup-requests", "0"),
)
QUESTION_TOKENS = 32
PREFIXES = 32
SHARED = (
    *("--dataset-name", "generated-shared-prefix", "--gsp-num-groups", str(PREFIXES), "--gsp-prompts-per-group", "1"),
    *("--gsp-system-prompt-len", "1024", "--gsp-output-len", "8"),
)
RANDOM_PROMPTS = 8
RANDOM = (
    *("--dataset-name", "random-ids", "--num-prompts", str(RANDOM_PROMPTS), "--tokenize-prompt"),
    *("--random-range-ratio", "1"),
    *("--random-input-len", "1024", "--random-output-len", "16"),
)

RETAINED = "cache-pressure"
SHARED_POINT = "generated-shared-prefix, 4x the pool"
RANDOM_POINT = "random, nothing shared"
POINTS = (RETAINED, SHARED_POINT, RANDOM_POINT)

PAGE = Page(
    name="judges",
    command="make bench-judges",
    summary=(
        f"Each server has the demo model, and a pool of {POOL_SLOTS:,} token slots.\n\n"
        f"* *{RETAINED}* (of PyPI, requirements/cache-pressure.txt) sends "
        f"{CONTEXTS} contexts one after the other, then asks for each again, the newest first. It counts those whose "
        "first token comes sooner than half-way between a cold and a warm one, and stops at the first that does not: "
        f"`{' '.join(PRESSURE).split('/')[-1]}`.\n"
        f"* *{SHARED_POINT}* is `{' '.join((*BENCH_SERVING, *SHARED))} --gsp-question-len N --seed 1`. Prefixes depend "
        f"on the seed alone. The run with N = {QUESTION_TOKENS} fills the cache and is not counted; each repetition "
        "has questions longer by a token, so that they are new.\n"
        f"* *{RANDOM_POINT}* is `{' '.join((*BENCH_SERVING, *RANDOM))} --seed N`, another seed in each repetition. "
        "(The data set `random` itself would be downloaded.)"
    ),
    tables=(
        REQUESTS,
        FIRST_TOKEN,
        HIT_RATE,
        Table("retained", f"Contexts of {CONTEXTS} that cache-pressure finds again", has_ratio=False, digits=0),
    ),
)


def main() -> None:
    """Run the judges."""
    options = parse_options(__doc__ or "")
    recorder = Recorder(PAGE, options, POINTS)
    systems = compared_systems(POOL_SLOTS, beside=options.beside)
    with running(systems, options.model, LOGS / PAGE.name, recorder.progress) as fleet:
        for point in options.chosen(POINTS):
            flush_all(fleet)
            MEASURES[point](fleet, recorder)
    recorder.close()


def cache_pressure(fleet: Fleet, recorder: Recorder) -> None:
    """The contexts that each server retains; what the tool printed is kept with the servers' logs."""
    for name, server in fleet.items():
        result = LOGS / PAGE.name / f"cache-pressure-{name}.json"
        command = (str(ROOT / PRESSURE[0]), "--base-url", f"{server.url}/v1", *PRESSURE[1:], "--output", str(result))
        with alone(server, fleet.values()):
            done = subprocess.run(command, capture_output=True, text=True, check=True)
        result.with_suffix(".txt").write_text(done.stdout, encoding="utf-8")
        found = json.loads(result.read_text(encoding="utf-8"))
        recorder.add(RETAINED, name, 1, {"retained": float(found["retained"])})


def bench_serving(server: RunningServer, model: Path, requests: int, *arguments: str) -> dict[str, float]:
    """Run SGLang's client as a process; it sends so many ``requests``.

    RuntimeError: a request failed, or the client did.
    """
    path = LOGS / PAGE.name / "bench_serving.jsonl"
    path.unlink(missing_ok=True)
    command = [sys.executable, *BENCH_SERVING[1:], "--base-url", server.url, "--model", str(model), *arguments]
    done = subprocess.run([*command, "--output-file", str(path)], capture_output=True, text=True)
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if done.returncode or found.get("completed") != requests:
        shown = f"exit code {done.returncode}, {found.get('completed')} of {requests} requests completed"
        raise RuntimeError(f"bench_serving {' '.join(arguments)}: {shown}\n{done.stderr[-2000:]}")
    return {
        "requests_per_s": found["request_throughput"],
        "ttft_ms": found["median_ttft_ms"],
        "hit_rate_pct": found["cache_report"]["cache_hit_rate_pct"],
    }


def shared_prefixes(fleet: Fleet, recorder: Recorder) -> None:
    """New questions on the same prefixes."""

    def one(name: str, repetition: int) -> None:
        length = ("--gsp-question-len", str(QUESTION_TOKENS + repetition), "--seed", "1")
        found = bench_serving(fleet[name], recorder.options.model, PREFIXES, *SHARED, *length)
        if repetition:
            recorder.add(SHARED_POINT, name, repetition, found)

    for name, server in fleet.items():
        with alone(server, fleet.values()):
            one(name, 0)
    in_turn(fleet, recorder.options.repeats, one)


def nothing_shared(fleet: Fleet, recorder: Recorder) -> None:
    """New prompts."""

    def one(name: str, repetition: int) -> None:
        found = bench_serving(fleet[name], recorder.options.model, RANDOM_PROMPTS, *RANDOM, "--seed", str(repetition))
        recorder.add(RANDOM_POINT, name, repetition, found)

    in_turn(fleet, recorder.options.repeats, one)


MEASURES = dict(zip(POINTS, (cache_pressure, shared_prefixes, nothing_shared), strict=True))

if __name__ == "__main__":
    main()
