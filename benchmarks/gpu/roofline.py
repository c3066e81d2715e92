"""Write docs/results/gpu/roofline.md: the least time of every timed line, and what the code of wide tiles allows.

Runs on any machine, from the repository root: python benchmarks/gpu/roofline.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpu_bench import roofline

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "results" / "gpu"
DEVICES = ("H100", "H200", "A100", "L4", "RTX 4090")
TRITON = "3.8.0"
"""Rows of compiled.md that count: the compiler of CUDA servers."""
TEXT = """# What is possible on a GPU

Written by `python benchmarks/gpu/roofline.py`; arithmetic, nothing measured. Sizes are those that
`benchmarks/gpu/run_all.py` times, whose rows and output say how much of this they reach (llama-8B's shape: 8 KV heads
of 4 q heads, 128 wide, prefixes of 32,768 tokens, a fifth kept).

Bytes: K, V, 4 bytes of index per entry, queries and results, each once. Operations: both products, over visible (query,
key) pairs. The least time is the longer of bytes over memory bandwidth and operations over the tensor cores' peak;
launches, latencies, exponentials and partial results take none, so lines of a few microseconds cannot reach it.
"""
LOOPS = """## What the code of wide tiles allows

`split` is the decode kernel with the q rows of many sharers of a span, or of several new tokens of a request; `extend`
is `ragged_extend`. Per 64 keys and multiprocessor, of all resident programs, from the machine code
([compiled.md](compiled.md), triton {triton}): cycles in which each scheduler issues an instruction, cycles of the
tensor cores at their peak, and cycles of a warp alone without its products. Every product is waited for, so a warp's
own products overlap with nothing of its own. Share of the tensor cores' peak: if no warp overlaps with another; if they
are half a step apart; and for the mean of both times, the estimate.
"""


LATENTS = """## Latents

One layer of a decode step on latents (MLA, [design.md](../../design.md#latent-attention)), 6,554 entries a request: a
fifth of 32,768. An entry is 1,152 bytes in bfloat16, key and value. No benchmark times these lines; counted like those
above, so float32 partial results are not. The code has a line in [compiled.md](compiled.md) for each kernel, at a
head_dim of 576/512.
"""
LATENT_ENTRIES = 6554


def main() -> int:
    """Write the page."""
    path = FOLDER / "roofline.md"
    path.write_text(page())
    print(path)
    return 0


def page() -> str:
    """The page; reads the committed compiled.md."""
    from gpu_bench import roofline

    peaks = [(name, roofline.PEAKS[name]) for name in DEVICES]
    lines = ["| device | memory, TB/s | bfloat16, TFLOP/s |", "|---|--:|--:|"]
    lines += [f"| {name} | {one.bytes_per_second / 1e12:.3g} | {one.flops / 1e12:.4g} |" for name, one in peaks]
    units = " | ".join(f"{name}, us" for name in DEVICES)
    lines += ["", f"| section | line | MB | GFLOP | {units} |", "|---|---|" + "--:|" * (2 + len(DEVICES))]
    for (named, work), sections in _lines().items():
        cells = [", ".join(sections), named, f"{work.num_bytes / 1e6:.4g}", f"{work.flops / 1e9:.4g}"]
        cells += [_least(work, one) for _, one in peaks]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "*: bound by the tensor cores; others by memory.", "", LATENTS]
    lines += [f"| q heads | requests | MB | GFLOP | {units} |", "|--:|--:|" + "--:|" * (2 + len(DEVICES))]
    for num_heads in (16, 128):
        for requests in (1, 8, 64):
            work = roofline.latent_decode(num_heads, requests, LATENT_ENTRIES)
            cells = [str(num_heads), str(requests), f"{work.num_bytes / 1e6:.4g}", f"{work.flops / 1e9:.4g}"]
            cells += [_least(work, one) for _, one in peaks]
            lines.append(f"| {' | '.join(cells)} |")
    lines += ["", LOOPS.format(triton=TRITON)]
    names = "| kernel | sm | head_dim | q rows | programs | issue | tensor | warp alone "
    lines += [names + "| none overlap | half a step apart | estimate |", "|---|--:|" + "--:|" * 9]
    for kernel, loop in product_loops():
        cells = [kernel, loop.arch, loop.head_dim, loop.rows, loop.programs]
        cells += [round(loop.issue_slots), round(loop.tensor_cycles), loop.cycles]
        lines.append(f"| {' | '.join([*map(str, cells), *(f'{100 * share:.0f} %' for share in loop.shares())])} |")
    return TEXT + "\n" + "\n".join(lines) + "\n"


def _lines() -> dict[tuple[str, roofline.Work], list[str]]:
    """The sections that time each line."""
    from gpu_bench.roofline import TIMED
    from gpu_bench.setting import FULL

    found: dict[tuple[str, roofline.Work], list[str]] = {}
    for section, timed in TIMED.items():
        for row in timed.lines(FULL):
            named = ", ".join(f"{name} {value}" for name, value in row.items())
            found.setdefault((named, timed.work(FULL, row)), []).append(section)
    return found


def _least(work: roofline.Work, peaks: roofline.Peaks) -> str:
    mark = "" if work.bound(peaks) == "memory" else "*"
    return f"{work.least_seconds(peaks) * 1e6:.4g}{mark}"


def product_loops() -> Iterator[tuple[str, roofline.ProductLoop]]:
    """The loops of the plain kernels with wide tiles of compiled.md: no windows, trees, fp8 rows or latents."""
    from gpu_bench.roofline import ProductLoop

    from kvevict_kernels.device_limits import DeviceLimits
    from kvevict_kernels.ragged_decode.tile_table import EXTEND, SMALL_SHARED, tiles_for

    table = [line for line in (FOLDER / "compiled.md").read_text().splitlines() if line.startswith("| ")]
    names = [cell.strip() for cell in table[0].split("|")[1:-1]]
    for line in table[2:]:
        row = dict(zip(names, [cell.strip() for cell in line.split("|")[1:-1]], strict=True))
        kernel, _, tile = row["kernel"].partition(", ")
        if kernel not in ("split", "extend") or row["triton"] != TRITON or not row["head_dim"].isdigit():
            continue
        arch, head_dim = int(row["sm"]), int(row["head_dim"])
        limits = DeviceLimits(arch, num_sms=1, shared_per_sm=SMALL_SHARED if arch == 89 else 2 * SMALL_SHARED)
        chosen = tiles_for(limits, head_dim)[EXTEND if kernel == "extend" else 1]
        if tile == f"{chosen.rows} q rows":
            numbers = [int(row[name]) for name in ("programs per SM", "instructions", "cycles")]
            yield kernel, ProductLoop(arch, head_dim, chosen.rows, chosen.warps, *numbers)


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
    sys.exit(main())
