"""Everything that a GPU machine is wanted for, in three calls of which each is useful alone.

    python3 tools/gpu_kit/run.py FOLDER CALL [--seconds 500] [--kit /tmp/kit] [--out $OUT] [--no-graphs] [--tiny]

FOLDER holds the kit's parts. Run it from the repository's root on the GPU machine. No call needs what another one left
there; where the machine is the same, parts are unpacked already and kernels compiled. Which call has which steps, what
each of them needs and may take: ``CALLS``.

| step | does |
|---|---|
| unpack | the parts of FOLDER that are new |
| smoke | operators beside torch |
| answers | greedy answers of ours beside stock's, decode steps captured |
| ours, fa3, ours-16, ours-full, triton | each a server of llama-8B's shape: decode, first token, pressure, leaks |
| tests | ``pytest -m gpu`` of kernels and attention |
| times | kernels and attention beside a copy, FA3 and FlashInfer |
| mixed | random traffic with aborts |
| real-answers | SmolLM2's answers beside those in FOLDER/expected.jsonl, if its parts are there |

Stop rules: an essential operator is wrong, or parts are damaged: the call ends (exit code 2; give the machine back).
FA3 fails: without ``fa3``. The first server does not start: one more try of everything without captured decode steps
(``--no-graphs`` begins like that); if that fails too the call ends. A step for which the seconds are not left is not
begun (exit code 4). Exit code 1: something is not as in ``expected.txt``, and the last lines say what.

``OUT`` gets ``run.log``, all that was printed; ``rows.jsonl`` of all servers; ``found.txt``, what was found beside
speed, which is compared with ``expected.txt``; ``logs.tar.xz``; and the page of ``times``.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / "tools" / "gpu_kit"
SERVE, RUN_ALL = (ROOT / "benchmarks" / "gpu" / name for name in ("serve_gpu.py", "run_all.py"))
EXPECTED = TOOLS / "expected.txt"
DONE, DIFFERS, GIVE_BACK, NO_TIME = 0, 1, 2, 4
NO_SERVER = 3  # exit code of serve_gpu.py if the first server did not start
ESSENTIAL = 2  # exit code of smoke.py if no server can answer
SECONDS = 500.0  # of a call
SLOWER = 10  # so many times a step's seconds are its limit on a faked GPU
RESERVE_SECONDS = 10.0  # kept back of what is left, to write results
FACTS = ("attention", "like_first", "leaks", "errors")  # of rows: neither the device's speed nor sizes change them
SECTIONS = ("bandwidth", "sharers", "extend", "compaction", "error", "uniform", "compression", "correctness", "graph")
SECTIONS += ("planning", "ordering", "shapes")  # of run_all.py, what is worth most first


@dataclass(frozen=True)
class Step:
    """A part of a call."""

    name: str  # also of its folder of results
    needs_s: float  # it is not begun with fewer seconds left
    limit_s: float  # it is ended after so many
    is_server: bool = False  # it starts servers


UNPACK, SMOKE = Step("unpack", 20, 90), Step("smoke", 20, 90)
# The first one makes the random model, and its weights of 16 GB are loaded by each.
OURS, FA3, OURS_16, OURS_FULL, TRITON = (
    Step(name, 90, 200, is_server=True) for name in ("ours", "fa3", "ours-16", "ours-full", "triton")
)
MIXED = Step("mixed", 70, 130, is_server=True)
ANSWERS, REAL_ANSWERS = Step("answers", 60, 170, is_server=True), Step("real-answers", 60, 200, is_server=True)
CALLS = {
    "servers": (UNPACK, SMOKE, ANSWERS, OURS, FA3),
    "kernels": (UNPACK, Step("tests", 60, 200), Step("times", 60, 300)),
    "rest": (UNPACK, SMOKE, OURS_16, OURS_FULL, MIXED, TRITON, REAL_ANSWERS),
}
# Runs a step with a limit in seconds, captured decode steps or not; its exit code, 124 if it was ended.
Run = Callable[[Step, float, bool], int]


def follow(
    steps: Iterable[Step], run: Run, left: Callable[[], float], is_wanted: Callable[[Step], bool], *, graphs: bool
) -> int:
    """Run the steps that are wanted, by the stop rules: the exit code of the whole."""
    has_started, result = False, DONE
    for step in steps:
        if not is_wanted(step):  # asked now: what an earlier step found decides
            continue
        while True:
            if left() < step.needs_s + RESERVE_SECONDS:
                print(f"run: {step.name} needs {step.needs_s:.0f} s, {left():.0f} are left: not begun", flush=True)
                result, code = NO_TIME, DONE
                break
            print(f"run: {step.name}, {left():.0f} s left", flush=True)
            code = run(step, min(step.limit_s, left() - RESERVE_SECONDS), graphs)
            print(f"run: {step.name} ended with {code}", flush=True)
            if code != NO_SERVER or has_started or not graphs:
                break
            graphs = False  # for all systems, or their figures could not be compared
        if {UNPACK: code, SMOKE: code == ESSENTIAL}.get(step, code == NO_SERVER and not has_started):
            return GIVE_BACK
        has_started |= step.is_server and code in (0, 1)
    return result


def is_wanted(step: Step, parts: Path, kit: Path) -> bool:
    """Whether a step makes sense: no ``fa3`` if its operators are wrong, no SmolLM2 without its parts."""
    verdicts = kit / "smoke.json"
    if step is FA3 and verdicts.exists():
        found = json.loads(verdicts.read_text())
        return all(verdict == "right" for name, verdict in found.items() if name.startswith("FA3, head_dim 128"))
    pieces = {piece.name for folder in (parts, kit / "smollm2") for piece in folder.glob("smollm2-*.gguf-part")}
    return step is not REAL_ANSWERS or len(pieces) == 3 or (kit / "cache" / "sgl-kvevict" / "models").exists()


def command_of(step: Step, parts: Path, kit: Path, out: Path, seconds: float, *, graphs: bool, tiny: bool) -> str:
    """A step as a line of bash; its results lie in ``kit/results/STEP``, but for the page of ``times``."""
    python, folder = shlex.quote(sys.executable), shlex.quote(str(kit / "results" / step.name))
    inside = f". {shlex.quote(str(kit / 'env.sh'))} && "
    if step.name == "unpack":
        return f"{python} {TOOLS}/unpack.py {shlex.quote(str(parts))} --kit {shlex.quote(str(kit))}"
    if step.name == "smoke":
        return f"{inside}{python} {TOOLS}/smoke.py --out {shlex.quote(str(kit))}"
    if step.name == "tests":
        chosen = f"{ROOT}/tests/kernels" + ("/test_cut_runs.py" if tiny else f" {ROOT}/tests/attention")
        return f"{inside}{python} -m pytest {chosen} -m gpu -q -n {2 if tiny else 8} --maxfail=20 -p no:cacheprovider"
    if step.name == "times":
        limit = f"--limit {seconds - RESERVE_SECONDS:.0f} --out {shlex.quote(str(out))}"
        return f"{inside}{python} {RUN_ALL} --only {' '.join(SECTIONS)} {limit}{' --smoke' if tiny else ''}"
    serve = f"{python} {SERVE} --plan {step.name} --out {folder} --seconds {seconds - RESERVE_SECONDS:.0f}"
    serve += ("" if graphs else " --no-graphs") + (" --tiny" if tiny else "")
    if step is REAL_ANSWERS:
        serve += f" --expected {shlex.quote(str(known))}" if (known := parts / "expected.jsonl").exists() else ""
        convert = "from kvevict_tools.models import ensure_model; print(ensure_model())"
        return f"{inside}{python} -c {shlex.quote(convert)} && {serve}"
    return inside + serve


def found_in(step: Step, code: int | None, kit: Path) -> list[str]:
    """What a step came to beside speed, a line each: its exit code, rows that came, and their facts."""
    lines = [f"{step.name}: exit code {code}"]
    path = kit / "results" / step.name / "rows.jsonl"
    for row in map(json.loads, path.read_text().splitlines() if path.exists() else ()):
        if "system" in row:
            what = row["what"].rstrip("0123456789 ")  # sizes of a batch
            named = [name for name in FACTS if name in row and (name, row["system"]) != ("like_first", "budget 0.2")]
            lines.append(f"{step.name}: {row['system']}, {what}" + "".join(f", {name} {row[name]}" for name in named))
    return list(dict.fromkeys(lines))


def differences(found: Sequence[str], steps: Iterable[Step]) -> list[str]:
    """What is in ``expected.txt`` for some steps and was not found (-), and the other way round (+)."""
    begun = {f"{step.name}:" for step in steps}
    expected = [line for line in EXPECTED.read_text().splitlines() if line.partition(" ")[0] in begun]
    missing = [f"- {line}" for line in expected if line not in found]
    return missing + [f"+ {line}" for line in found if line not in expected]


def keep(kit: Path, out: Path) -> None:
    """Put rows of all steps into one file and logs into another: few files come back from a lent machine."""
    rows = sorted((kit / "results").glob("*/rows.jsonl"), key=lambda path: path.stat().st_mtime)
    (out / "rows.jsonl").write_text("".join(path.read_text() for path in rows))
    with tarfile.open(out / "logs.tar.xz", "w:xz") as archive:
        for path in sorted((kit / "results").glob("*/*.log")):
            archive.add(path, str(path.relative_to(kit / "results")))


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", type=Path, help="folder with the kit's parts")
    parser.add_argument("call", choices=CALLS)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for this call")
    parser.add_argument("--kit", type=Path, default=Path("/tmp/kit"))
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ROOT / "out" / "gpu")))
    parser.add_argument("--no-graphs", action="store_true", help="decode steps of all systems are not captured")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, on a faked GPU")
    args = parser.parse_args(arguments)
    end, codes = time.monotonic() + args.seconds, dict[str, int]()
    args.out.mkdir(parents=True, exist_ok=True)

    def run(step: Step, seconds: float, graphs: bool) -> int:
        seconds = min(step.limit_s * SLOWER, end - time.monotonic()) if args.tiny else seconds
        command = command_of(step, args.parts, args.kit, args.out, seconds, graphs=graphs, tiny=args.tiny)
        line = f"timeout --kill-after=20 {seconds:.0f} bash -c {shlex.quote(command)} 2>&1 | tee -a {args.out}/run.log"
        codes[step.name] = subprocess.run(["bash", "-o", "pipefail", "-c", line], check=False).returncode
        keep(args.kit, args.out)
        return codes[step.name]

    steps, wants = CALLS[args.call], partial(is_wanted, parts=args.parts, kit=args.kit)
    code = follow(steps, run, lambda: end - time.monotonic(), wants, graphs=not args.no_graphs)
    asked = [step for step in steps if step is not REAL_ANSWERS or wants(step)]
    found = [line for step in asked for line in found_in(step, codes.get(step.name), args.kit)]
    (args.out / "found.txt").write_text("".join(f"{line}\n" for line in found))
    differing = differences(found, asked)
    print("\n".join(f"run: {line}" for line in differing) or "run: all as expected", flush=True)
    return code or (DIFFERS if differing else DONE)


if __name__ == "__main__":
    sys.exit(main())
