"""Time of an entry at 16, 8 and 4 bits on a CPU: read by a decode step, and written by a resize.

Run: OMP_NUM_THREADS=1 python benchmarks/kernels/bench_row_widths.py [--repeats N] [--cpu-time]

One request decodes over one span, every call another layer, so that rows come from memory and not from caches; widths
alternate call by call, and the lower quartile of each is printed. The shapes are those of SmolLM2-135M, and the same
with rows twice as wide; ``--dtype float32`` is the pool of a CPU without bfloat16.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from kvevict_kernels.alloc_head_slots import alloc_head_slots
from kvevict_kernels.compact_kv import compact_kv
from kvevict_kernels.recode_rows import recode_rows
from kvevict_kernels.row_codec import WIDTHS, RowStatistics, rows_per_slot
from kvevict_kernels.span_runs import SpanRuns
from sgl_kvevict.attention import Attention, AttentionBatch, build_attention
from sgl_kvevict.geometry import KVGeometry

LAYERS, HEADS, GROUP_SIZE = 30, 3, 3
OWN_TOKENS = 1
"""Uncompressed tokens: next to nothing beside the span."""


@dataclass
class Setup:
    """A pool with one span in rows of 16, 8 and 4 bits, of equal runs with the same content."""

    head_dim: int
    entries: int  # per layer and KV head
    dtype: torch.dtype
    attention: Attention = field(init=False)
    batches: dict[int, AttentionBatch] = field(init=False)

    def __post_init__(self) -> None:
        lens = torch.full((LAYERS, HEADS), self.entries, dtype=torch.int32)
        self.num_entries = int(lens.sum())
        slots = torch.randperm(3 * self.entries + 16)
        self.geometry = KVGeometry(LAYERS, HEADS * GROUP_SIZE, HEADS, self.head_dim, slots.numel())
        shape = (LAYERS, HEADS, self.head_dim)
        self.statistics = RowStatistics(torch.randn(shape), torch.ones(shape), torch.randn(shape), torch.ones(shape))
        self.k, self.v = (torch.randn(self.geometry.arena_shape).to(self.dtype) for _ in "kv")
        self.runs = torch.arange(lens.numel(), dtype=torch.int32).repeat_interleave(self.entries)
        self.rows = {}
        taken = 0
        for bits in WIDTHS:
            per_slot = rows_per_slot(bits, self.dtype.itemsize)
            used = self.geometry.slots_for(-(-self.num_entries // per_slot))
            held = slots[taken : taken + used]
            taken += used
            indptr, self.rows[bits] = alloc_head_slots(lens, held, slots.numel(), self.num_entries, per_slot=per_slot)
        for bits in WIDTHS[1:]:
            self.write(bits)
        self.attention = build_attention("numba", self.geometry, self.k, self.v, statistics=self.statistics)
        starts = indptr[:-1].view(lens.shape)
        self.batches = {
            bits: AttentionBatch(
                paths=((SpanRuns(rows, starts, lens, self.entries, bits=bits),),),
                seq_lens=[self.entries + OWN_TOKENS],
                extend_lens=None,
                req_pool_indices=torch.zeros(1, dtype=torch.int64),
                req_to_token=slots[-1:].int().expand(1, self.entries + OWN_TOKENS).contiguous(),
            )
            for bits, rows in self.rows.items()
        }
        self.q = torch.randn(LAYERS, 1, HEADS * GROUP_SIZE, self.head_dim).to(self.dtype)

    def read(self, bits: int, layer: int) -> float:
        """Seconds of one layer of a decode step over the rows of one width."""
        self.attention.plan(self.batches[bits])
        start = clock()
        self.attention.run(layer, self.q[layer], self.head_dim**-0.5)
        return clock() - start

    def write(self, bits: int) -> float:
        """Seconds of writing all of the span's entries in one width, from 16 bits."""
        source, target = self.rows[WIDTHS[0]], self.rows[bits]
        start = clock()
        if bits == WIDTHS[0]:
            compact_kv(self.k, self.v, source, target)
        else:
            widths = torch.full((self.num_entries,), WIDTHS[0], dtype=torch.int8)
            recode_rows(self.k, self.v, source, widths, self.runs, [(target, bits)], self.statistics)
        return clock() - start


clock: Callable[[], float] = time.perf_counter


def lower_quartiles(call: Callable[[int, int], float], repeats: int) -> dict[int, float]:
    """Seconds by width; calls alternate."""
    times: dict[int, list[float]] = {bits: [] for bits in WIDTHS}
    for i in range(repeats + 2):
        for bits in WIDTHS:
            times[bits].append(call(bits, i % LAYERS))
    return {bits: sorted(found[2:])[repeats // 4] for bits, found in times.items()}


def main() -> None:
    """Print the table."""
    global clock
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=60, help="calls per width")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="of the pool")
    parser.add_argument("--cpu-time", action="store_true", help="CPU time of a single thread instead of time")
    args = parser.parse_args()
    if args.cpu_time:
        torch.set_num_threads(1)
        clock = time.thread_time
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {args.dtype}; ns per entry, lower quartile")
    columns = [f"{what} {bits}" for what in ("read", "write") for bits in WIDTHS]
    print(f"| head_dim | entries/head | {' | '.join([*columns, 'read 8 / 16', 'read 4 / 16'])} |")
    print("|--:|--:|" + "--:|" * (len(columns) + 2))
    for head_dim in (64, 128):
        for entries in (600, 2100, 6000):
            setup = Setup(head_dim, entries, getattr(torch, args.dtype))
            read = lower_quartiles(setup.read, args.repeats)
            written = lower_quartiles(lambda bits, _, setup=setup: setup.write(bits), 4)  # type: ignore[misc]
            numbers = [f"{1e9 * read[bits] / (entries * HEADS):.1f}" for bits in WIDTHS]
            numbers += [f"{1e9 * written[bits] / setup.num_entries:.1f}" for bits in WIDTHS]
            ratios = [f"{read[bits] / read[WIDTHS[0]]:.2f}x" for bits in WIDTHS[1:]]
            print(f"| {head_dim} | {entries} | {' | '.join([*numbers, *ratios])} |", flush=True)


if __name__ == "__main__":
    main()
