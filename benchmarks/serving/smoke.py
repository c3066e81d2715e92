"""Regression check in under three minutes: a few ratios of ours to stock, against those that were committed.

Prints every ratio (higher is better) and fails if one is below 80 % of the committed one. ``--record`` writes the
ratios of this run to docs/results/serving/smoke.csv instead.
"""

from __future__ import annotations

import csv
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import bench_decode
import bench_insertion
import bench_prefill
from serving_bench.compare import ratio
from serving_bench.driver import publish_server_args
from serving_bench.fleet import DEFAULT, compared_systems, running
from serving_bench.options import LOGS, Options, Recorder
from serving_bench.results import RESULTS, Row, origin

from kvevict_tools.models import ensure_model

LIMIT = 0.8
POOL_SLOTS = 8_000
OURS = DEFAULT
COUNTED = ("stock, Python core", bench_insertion.COMPRESSED)
"""Trees whose function calls can be counted: SGLang's default core makes none in Python."""
COMMITTED = RESULTS / "smoke.csv"


@dataclass(frozen=True)
class Check:
    """One ratio; ``is_cost``: less is better, so that the ratio is turned round."""

    name: str
    metric: str
    is_cost: bool = False


DECODE = (Check("decode tokens/s, prefix 3000", "decode_tokens_per_s"), Check("first token, cached", "ttft_s", True))
PREFILL = (Check("prefill tokens/s, 1024", "prompt_tokens_per_s"),)
TREE = ("match, hit", "lock and unlock", "insert a branch", "evict one leaf", "request with a new prompt")


def main() -> None:
    """Measure, print, compare."""
    is_recording = "--record" in sys.argv[1:]
    model = ensure_model(report=lambda text: print(text, file=sys.stderr))
    options = Options((), 3, True, "", model, LOGS / "smoke")
    found = tree_ratios() | server_ratios(options)
    committed = {} if is_recording else read_committed(COMMITTED)
    if is_recording:
        record(COMMITTED, found, options)
    print("| ratio, ours to stock (higher is better) | now | committed |\n|---|--:|--:|")
    for name, value in found.items():
        print(f"| {name} | {value:.2f} | {committed.get(name, value):.2f} |")
    if problems := regressions(found, committed):
        raise SystemExit("\n".join(problems))


def tree_ratios() -> dict[str, float]:
    """Function calls of tree operations: the same on every machine."""
    with tempfile.TemporaryDirectory() as folder:
        publish_server_args(Path(folder))
    stock, ours = (bench_insertion.measure_operations(name, 1_000, 50, 1) for name in COUNTED)
    return {f"tree: {name}, calls": stock[name].calls / ours[name].calls for name in TREE}


def server_ratios(options: Options) -> dict[str, float]:
    """Decode, first token and prefill of real servers."""
    decode = Recorder(bench_decode.PAGE, options, [bench_decode.QUICK[0].name])
    prefill = Recorder(bench_prefill.PAGE, options, [bench_prefill.QUICK[0].name])
    systems = compared_systems(POOL_SLOTS)
    with running(systems, options.model, LOGS / "smoke", decode.progress) as fleet:
        bench_decode.measure(fleet, bench_decode.QUICK[0], decode)
        bench_prefill.measure(fleet, bench_prefill.QUICK[0], prefill)
    found = ratios(decode.rows, decode.points[0], DECODE)
    return found | ratios(prefill.rows, prefill.points[0], PREFILL)


def ratios(rows: list[Row], point: str, checks: tuple[Check, ...]) -> dict[str, float]:
    """Median ratios of one point, higher is better."""
    found = {}
    for check in checks:
        measured = ratio(rows, point, OURS, check.metric, "stock")
        if measured is None:
            raise ValueError(f"{point}: {check.metric} was not measured on both systems")
        found[check.name] = 1 / measured.median if check.is_cost else measured.median
    return found


def regressions(found: dict[str, float], committed: dict[str, float]) -> list[str]:
    """What is below ``LIMIT`` of the committed ratio, and what was committed but not measured."""
    problems = [f"{name}: committed, but not measured" for name in committed if name not in found]
    for name, value in found.items():
        if name in committed and value < LIMIT * committed[name]:
            problems.append(f"{name}: {value:.2f} is below {LIMIT:.0%} of the committed {committed[name]:.2f}")
    return problems


def read_committed(path: Path) -> dict[str, float]:
    """Ratios by name."""
    with path.open(newline="", encoding="utf-8") as file:
        return {record["name"]: float(record["ratio"]) for record in csv.DictReader(file)}


def record(path: Path, found: dict[str, float], options: Options) -> None:
    """Write ratios with where they come from."""
    source = origin(options.text)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["name", "ratio", *source])
        writer.writerows([name, f"{value:.4g}", *source.values()] for name, value in found.items())


if __name__ == "__main__":
    main()
