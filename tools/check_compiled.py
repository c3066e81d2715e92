"""Every kernel, architecture and head_dim under both Tritons, beside the committed table (``make test-compile``).

Writes docs/results/gpu/compiled.md. Worse than what is committed is an error: a kernel that keeps more on the stack,
has fewer copies in flight, fewer resident programs, a tenth more instructions, or no longer fits. Who accepts it
deletes its row first.
"""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from helpers.compiled import compile_all
from helpers.gpu_kernels import (
    DEVICES,
    FP8,
    FP8_ARCH,
    HEAD_DIMS,
    LATENT_DIM,
    LATENT_VALUE_DIM,
    attention_kernels,
    few_bits_kernels,
    head_dim_kernels,
    label,
    small_kernels,
)

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "results" / "gpu" / "compiled.md"
CACHE = ROOT / ".setup" / "compiled"
"""What Triton keeps of what it compiled: only what changed is compiled again."""
OTHER_PYTHON = ROOT / ".venv-compile" / "bin" / "python"
COLUMNS = ("triton", "sm", "head_dim", "kernel", "registers", "stack", "shared", "programs per SM", "copies in flight")
COLUMNS += ("instructions",)
LOOP_KEYS = 64
"""Keys to which instructions refer."""
MORE_INSTRUCTIONS = 1.1
"""So many times the instructions are no regression."""
WORKERS = 4
"""Processes that compile at the same time."""
KEY = 4
"""So many columns name a row."""
TEXT = """# What the compiler makes of every kernel

Written by `make test-compile`, which needs no GPU. Registers and stack bytes are a thread's (what does not
fit into registers is on the stack), shared bytes a program's. Programs per SM are what is resident at once, by
registers, shared memory and threads. Copies in flight: groups of asynchronous copies that the loop with the products
leaves unfinished when it waits; K, V and the next indices are a group each, so 3 are one step ahead, 6 are two.
Instructions are those of a warp in the shortest pass of that loop, per 64 keys.
A head_dim of 576/512 means latents: keys of 576 numbers, of which 512 are also the value.
"""
Row = tuple[str, ...]


def rows_of(python: str, arch: int, cache_dir: Path) -> list[Row]:
    """Compile everything for one architecture with one interpreter."""
    version = compile_version(python)
    named = [("any", spec) for spec in small_kernels(arch)]
    for head_dim in HEAD_DIMS:
        for stored in ("bf16", FP8) if arch >= FP8_ARCH else ("bf16",):
            kernels = [*attention_kernels(arch, head_dim, stored), *head_dim_kernels(arch, head_dim, stored)]
            named += [(str(head_dim), spec) for spec in kernels]
        named += [(str(head_dim), spec) for spec in few_bits_kernels(arch, head_dim)]
    latents = [*attention_kernels(arch, LATENT_DIM), *head_dim_kernels(arch, LATENT_DIM)]
    named += [(f"{LATENT_DIM}/{LATENT_VALUE_DIM}", spec) for spec in latents]
    results = compile_all([spec for _, spec in named], str(cache_dir), python)
    return [
        (version, str(arch), head_dim, label(spec), *facts(spec, result))
        for (head_dim, spec), result in zip(named, results, strict=True)
    ]


def compile_version(python: str) -> str:
    """Version of the interpreter's triton."""
    command = [python, "-c", "import importlib.metadata as m; print(m.version('triton'))"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def facts(spec: dict[str, Any], result: dict[str, Any]) -> Row:
    """The columns behind the key."""
    arch, name = spec["arch"], label(spec)
    limits = DEVICES[arch]
    assert result["shared"] <= limits.shared_per_block, f"{name}: {result['shared']} bytes shared on sm_{arch}"
    programs = limits.programs_per_sm(registers=result["registers"], shared=result["shared"], num_warps=result["warps"])
    shown = [result["registers"], result["stack"], result["shared"], programs, result["in_flight"]]
    is_over_keys = name.startswith(("split", "extend"))
    shown.append(round(result["instructions"] * LOOP_KEYS / spec["args"]["BLOCK_N"]) if is_over_keys else None)
    return tuple("" if value is None else str(value) for value in shown)


def committed() -> dict[Row, Row]:
    """Rows of the committed page, by key."""
    if not PAGE.exists():
        return {}
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and line[2].isdigit()]
    rows = [tuple(cell.strip() for cell in line.split("|")[1:-1]) for line in lines]
    return {row[:KEY]: row[KEY:] for row in rows}


def regressions(rows: list[Row], before: dict[Row, Row]) -> list[str]:
    """What got worse."""
    problems = []
    for row in rows:
        old = before.get(row[:KEY])
        if old is None:
            continue
        pairs = zip(COLUMNS[KEY:], old, row[KEY:], strict=True)
        for name, was, now in pairs:
            is_worse = {
                "stack": lambda w, n: int(n) > int(w),
                "programs per SM": lambda w, n: int(n) < int(w),
                "copies in flight": lambda w, n: int(n or 0) < int(w or 0),
                "instructions": lambda w, n: int(n or 0) > MORE_INSTRUCTIONS * int(w or n or 0),
            }.get(name)
            if is_worse is not None and is_worse(was, now):
                problems.append(f"triton {row[0]}, sm_{row[1]}, head_dim {row[2]}, {row[3]}: {name} {was} -> {now}")
    return problems


def must_hold(rows: list[Row]) -> list[str]:
    """What no table may show: attention over rows of 16 bits that uses the stack, and one that waits for all copies."""
    problems = []
    for row in rows:
        kernel, stack, in_flight = row[3], int(row[5]), row[8]
        if kernel.startswith(("split", "extend")):
            if stack and "bits" not in kernel:  # rows of few bits are held to the committed page
                problems.append(f"{row[:KEY]}: {stack} bytes of stack")
            if int(in_flight or 0) < 3:
                problems.append(f"{row[:KEY]}: waits for all but {in_flight} copies")
    return problems


@pytest.mark.timeout(0)  # a busy machine is slow, not wrong
def test_nothing_got_worse(tmp_path: Path) -> None:
    """Both compilers; the page is written anew if nothing got worse."""
    assert OTHER_PYTHON.exists(), "make test-compile sets it up"
    jobs = [(python, arch) for python in (sys.executable, str(OTHER_PYTHON)) for arch in DEVICES]
    with ThreadPoolExecutor(WORKERS) as pool:
        parts = pool.map(lambda job: rows_of(*job, CACHE / Path(job[0]).parents[1].name / str(job[1])), jobs)
    rows = [row for part in parts for row in part]
    problems = must_hold(rows) + regressions(rows, committed())
    (tmp_path / "compiled.md").write_text(page(rows))
    assert not problems, "\n".join([f"the new table: {tmp_path / 'compiled.md'}", *problems])
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(page(rows))


def page(rows: list[Row]) -> str:
    """The table."""
    lines = [f"| {' | '.join(row)} |" for row in [COLUMNS, ("---",) * len(COLUMNS), *rows]]
    return TEXT + "\n" + "\n".join(lines) + "\n"
