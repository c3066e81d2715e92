"""Everything that a GPU machine is wanted for, in order, in one command that is repeated until nothing is left.

    python3 tools/gpu_kit/run.py FOLDER [--seconds 560] [--kit /tmp/kit] [--out $OUT]

FOLDER holds the kit's parts. Run it from the repository's root on the GPU machine; what is done is kept in
``KIT/progress.json``, so the same command goes on where it stopped, also with more parts (SmolLM2) in FOLDER.

| step | needs s | does |
|---|---|---|
| unpack | 30 | the parts of FOLDER that are new |
| smoke | 30 | operators beside torch |
| answers | 60 | greedy answers of ours beside stock's, decode steps captured |
| ours, fa3, ours-full, triton | 90 | each a server of llama-8B's shape: decode, first token, pressure, leaks |
| mixed | 90 | random traffic with aborts |
| tests | 60 | `pytest -m gpu` of kernels and attention |
| real-answers | 90 | SmolLM2's answers beside those in FOLDER/expected.jsonl; once its parts are there |

Stop rules: an essential operator is wrong, or parts are damaged: the run ends (exit code 2; give the machine back). FA3
fails: without ``fa3``. The first server does not start: one more try of everything without captured decode steps; if
that fails too the run ends. A step for which the seconds are not left is not begun (exit code 4: call again).
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / "tools" / "gpu_kit"
SERVE = ROOT / "benchmarks" / "gpu" / "serve_gpu.py"
DONE, GIVE_BACK, CALL_AGAIN = 0, 2, 4
NO_SERVER = 3
"""Exit code of ``serve_gpu.py`` if the first server did not start."""
ESSENTIAL = 2
"""Exit code of ``smoke.py`` if no server can answer."""
RESERVE_SECONDS = 10.0
"""Kept back of what is left, to write results."""


@dataclass(frozen=True)
class Step:
    """A part of the run.

    Attributes:
        name: of the step and of its folder of results.
        needs_s: it is not begun with fewer seconds left.
        limit_s: it is ended after so many.
        is_server: it starts servers.
    """

    name: str
    needs_s: float
    limit_s: float
    is_server: bool = False


STEPS = (
    Step("unpack", 30, 150),
    Step("smoke", 30, 150),
    Step("answers", 60, 260, is_server=True),
    *(Step(name, 90, 300, is_server=True) for name in ("ours", "fa3", "ours-full", "triton")),
    Step("mixed", 90, 240, is_server=True),
    Step("tests", 60, 180),
    Step("real-answers", 90, 300, is_server=True),
)


@dataclass
class Progress:
    """What is known from earlier calls.

    Attributes:
        done: steps that are not begun again, and their exit codes.
        graphs: decode steps are captured.
        has_started: a server has started.
    """

    done: dict[str, int] = field(default_factory=dict)
    graphs: bool = True
    has_started: bool = False

    @classmethod
    def read(cls, path: Path) -> Progress:
        """The progress in a file; none if there is no file."""
        return cls(**json.loads(path.read_text())) if path.exists() else cls()

    def write(self, path: Path) -> None:
        """Keep it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self)))


Run = Callable[[Step, float, bool], int]
"""Runs a step with a limit in seconds, captured decode steps or not; its exit code, 124 if it was ended."""


def follow(progress: Progress, run: Run, left: Callable[[], float], keep: Callable[[], None], wanted: set[str]) -> int:
    """Run the steps that are wanted and not done, by the stop rules; the exit code of the whole."""
    for step in STEPS:
        if step.name not in wanted or (step.name in progress.done and step.name != "unpack"):
            continue
        while True:
            if left() < step.needs_s + RESERVE_SECONDS:
                print(f"run: {step.name} needs {step.needs_s:.0f} s, {left():.0f} are left: call again", flush=True)
                return CALL_AGAIN
            print(f"run: {step.name}, {left():.0f} s left", flush=True)
            code = run(step, min(step.limit_s, left() - RESERVE_SECONDS), progress.graphs)
            print(f"run: {step.name} ended with {code}", flush=True)
            is_first = step.is_server and not progress.has_started
            if code != NO_SERVER or not is_first or not progress.graphs:
                break
            progress.graphs = False  # for all systems, or their figures could not be compared
            keep()
        progress.done[step.name] = code
        progress.has_started |= step.is_server and code in (0, 1)
        keep()
        if (step.name == "unpack" and code) or (step.name == "smoke" and code == ESSENTIAL):
            return GIVE_BACK
        if code == NO_SERVER and is_first:
            return GIVE_BACK
    return DONE


def wanted_steps(parts: Path, kit: Path) -> set[str]:
    """Steps that make sense: no ``fa3`` if its operators are wrong, no SmolLM2 before its parts are there."""
    wanted = {step.name for step in STEPS}
    verdicts = kit / "smoke.json"
    if verdicts.exists() and any(
        verdict != "right"
        for name, verdict in json.loads(verdicts.read_text()).items()
        if name.startswith("FA3, head_dim 128")
    ):
        wanted.discard("fa3")
    pieces = [*parts.glob("smollm2-*.gguf-part"), *(kit / "smollm2").glob("*.gguf-part")]
    if len({piece.name for piece in pieces}) < 3 and not (kit / "cache" / "sgl-kvevict" / "models").exists():
        wanted.discard("real-answers")
    return wanted


def command_of(step: Step, parts: Path, kit: Path, out: Path, seconds: float, *, graphs: bool) -> str:
    """A step as a line of bash."""
    python, folder = shlex.quote(sys.executable), shlex.quote(str(out / step.name))
    inside = f". {shlex.quote(str(kit / 'env.sh'))} && "
    if step.name == "unpack":
        return f"{python} {TOOLS}/unpack.py {shlex.quote(str(parts))} --kit {shlex.quote(str(kit))}"
    if step.name == "smoke":
        return f"{inside}{python} {TOOLS}/smoke.py --out {shlex.quote(str(kit))}"
    if step.name == "tests":
        chosen = f"{ROOT}/tests/kernels {ROOT}/tests/attention"
        return f"{inside}{python} -m pytest {chosen} -m gpu -q --maxfail=20 -p no:cacheprovider"
    serve = f"{python} {SERVE} --plan {step.name} --out {folder} --seconds {seconds:.0f}"
    serve += "" if graphs else " --no-graphs"
    if step.name == "real-answers":
        expected = parts / "expected.jsonl"
        serve += f" --expected {shlex.quote(str(expected))}" if expected.exists() else ""
        convert = "from kvevict_tools.models import ensure_model; print(ensure_model())"
        return f"{inside}{python} -c {shlex.quote(convert)} && {serve}"
    return inside + serve


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", type=Path, help="folder with the kit's parts")
    parser.add_argument("--seconds", type=float, default=560.0, help="for this call")
    parser.add_argument("--kit", type=Path, default=Path("/tmp/kit"))
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ROOT / "out" / "gpu")))
    args = parser.parse_args(arguments)
    end, state = time.monotonic() + args.seconds, args.kit / "progress.json"
    progress = Progress.read(state)
    args.out.mkdir(parents=True, exist_ok=True)

    def run(step: Step, seconds: float, graphs: bool) -> int:
        command = command_of(step, args.parts, args.kit, args.out, seconds, graphs=graphs)
        log = args.out / f"{step.name}.log"
        line = f"timeout --kill-after=20 {seconds:.0f} bash -c {shlex.quote(command)} 2>&1 | tee -a {log}"
        return subprocess.run(["bash", "-o", "pipefail", "-c", line], check=False).returncode

    def again(names: set[str]) -> int:
        return follow(progress, run, lambda: end - time.monotonic(), lambda: progress.write(state), names)

    code = again({"unpack", "smoke"})  # what they find decides what else is wanted
    return code or again(wanted_steps(args.parts, args.kit) - {"unpack"})


if __name__ == "__main__":
    sys.exit(main())
