"""An earlier commit of this project beside this one: the same servers, requests and pool, in turn.

The earlier one is checked out into a folder of its own and served from there, with the SGLang that is installed.
"""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import bench_decode
import bench_shared_prefix
from serving_bench.fleet import COMMON_FLAGS, Fleet, running
from serving_bench.options import LOGS, Recorder, parse_options
from serving_bench.page import Page, Table
from serving_bench.results import ROOT

from kvevict_tools.launcher import System, kvevict_system

BEFORE = "ae37000"
"""The last commit without prompts longer than the pool, speculation, images, latents and the host's memory."""
POOL_SLOTS = 10_000
DECODE = (bench_decode.Point(3000, 1, 48, 16), bench_decode.Point(4096, 8, 32, 16))
SHARED = (bench_shared_prefix.Point("0.5x the pool", 4), bench_shared_prefix.Point("4x the pool", 32))

PAGE = Page(
    name="commits",
    command="python benchmarks/serving/bench_commits.py",
    summary=(
        f"`before` is commit {BEFORE}, the last one without prompts longer than the pool, speculation, images, latents "
        "and the host's memory; `now` is this one. Both serve the default configuration from a pool of "
        f"{POOL_SLOTS:,} token slots. Decode as in [decode](decode.md), working sets as in "
        "[shared-prefix](shared-prefix.md)."
    ),
    tables=(
        Table("decode_tokens_per_s", "Decode, tokens/s of the whole batch", digits=1),
        Table("ttft_s", "First token, prefix cached, median s"),
        Table("requests_per_s", "Requests/s"),
        Table("hit_rate_pct", "Prompt tokens found in the cache, %", has_ratio=False, digits=0),
    ),
    baseline="before",
)


def main() -> None:
    """Run the benchmark."""
    options = parse_options(__doc__ or "")
    measures: dict[str, Callable[[Fleet, Recorder], None]] = {}
    for decode in DECODE:
        measures[decode.name] = lambda fleet, to, point=decode: bench_decode.measure(fleet, point, to)
    for shared in SHARED:
        measures[shared.name] = lambda fleet, to, point=shared: bench_shared_prefix.measure(fleet, point, to)
    recorder = Recorder(PAGE, options, list(measures))
    systems = [system("before", checked_out(BEFORE)), system("now", ROOT)]
    with running(systems, options.model, LOGS / PAGE.name, recorder.progress) as fleet:
        for name in options.chosen(list(measures)):
            measures[name](fleet, recorder)
    recorder.close()


def checked_out(commit: str) -> Path:
    """Folder with the files of a commit; the checkout must know the commit."""
    folder = LOGS / PAGE.name / commit
    if not folder.exists():
        packed = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True).stdout
        with tarfile.open(fileobj=io.BytesIO(packed)) as files:
            files.extractall(folder, filter="data")
    return folder


def system(name: str, folder: Path) -> System:
    """A server of the project in a folder."""
    env = {
        "PYTHONPATH": os.pathsep.join([str(folder), str(folder / "kernels")]),
        "PYTHONSAFEPATH": "1",  # the current folder, which may be this commit's, does not come first
    }
    return kvevict_system(name, {}, ("--max-total-tokens", str(POOL_SLOTS), *COMMON_FLAGS), env)


if __name__ == "__main__":
    main()
