"""Both CPU attentions beside SGLang's torch_native algorithm, per layer.

The shapes are those of SmolLM2-135M.

Run: OMP_NUM_THREADS=2 python benchmarks/kernels/bench_cpu_attention.py [--repeats N]

They alternate call by call, every call on another layer, and the lower quartile of each is printed: on a shared
machine the median shows the neighbours. On a busy one take --cpu-time: with more than one thread, threads wait for one
that is not running. The results are compared first.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvevict_kernels.alloc_head_slots import alloc_head_slots
from kvevict_kernels.span_runs import SpanRuns
from sgl_kvevict.attention import Attention, AttentionBatch, build_attention
from sgl_kvevict.geometry import KVGeometry

GEOMETRY = KVGeometry(num_layers=30, num_qo_heads=9, num_kv_heads=3, head_dim=64, num_token_slots=32768)
SM_SCALE = GEOMETRY.head_dim**-0.5


@dataclass(frozen=True)
class Case:
    """A batch of equal requests.

    Attributes:
        name: what the row is called.
        num_requests: requests.
        span_entries: entries per KV head of the compressed prefix, on average; 0: nothing is compressed.
        is_shared: all requests read the same span.
        cached: uncompressed tokens before the new ones, per request.
        new: new tokens per request; 0: a decode step (one new token).
        full_tokens: tokens that the baseline reads before the new ones: the prefix before compression.
    """

    name: str
    num_requests: int
    span_entries: int
    is_shared: bool
    cached: int
    new: int
    full_tokens: int


CASES = [
    Case("decode, span 600/head + 80", 1, 600, False, 79, 0, 3079),
    Case("decode, span 300/head + 80", 1, 300, False, 79, 0, 3079),
    Case("decode, 3000 uncompressed", 1, 0, False, 2999, 0, 2999),
    Case("decode, 300 uncompressed", 1, 0, False, 299, 0, 299),
    Case("decode, 8 x (shared span 600/head + 80)", 8, 600, True, 79, 0, 3079),
    Case("decode, 8 x (own span 600/head + 80)", 8, 600, False, 79, 0, 3079),
    Case("decode, 8 x 3000 uncompressed", 8, 0, False, 2999, 0, 2999),
    Case("extend, 3000 new", 1, 0, False, 0, 3000, 0),
    Case("extend, 1000 uncompressed + 1000 new", 1, 0, False, 1000, 1000, 1000),
    Case("extend, span 600/head + 16 new", 1, 600, False, 0, 16, 3000),
    Case("extend, span 600/head + 40 new", 1, 600, False, 0, 40, 3000),
    Case("extend, span 600/head + 256 new", 1, 600, False, 0, 256, 3000),
    Case("extend, 4 x (shared span 600/head + 40 new)", 4, 600, True, 0, 40, 3000),
]


def uneven_span(num_entries: int, token_slots: Tensor, generator: torch.Generator) -> SpanRuns:
    """A span whose heads keep between a third and five thirds of the average, packed into token slots."""
    shape = (GEOMETRY.num_layers, GEOMETRY.num_kv_heads)
    keep_lens = (num_entries * (torch.rand(shape, generator=generator) * 4 / 3 + 1 / 3)).int()
    used = int(keep_lens.sum())
    held = token_slots[: GEOMETRY.slots_for(used)].long()
    indptr, head_slots = alloc_head_slots(keep_lens, held, GEOMETRY.num_token_slots, used)
    return SpanRuns(head_slots, indptr[:-1].view(shape), keep_lens, num_tokens=3000)


def torch_native(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, req_to_token: Tensor, seq_lens: list[int], new_lens: list[int]
) -> Tensor:
    """SGLang's torch_native backend: per request, gather its cache rows, then one call.

    A prefill fills up the queries to the length of the keys (rows that nobody reads) to get the causal alignment.
    """
    out = torch.empty_like(q)
    queries = q.movedim(0, 1)
    first = 0
    for i, (seq_len, new) in enumerate(zip(seq_lens, new_lens, strict=True)):
        slots = req_to_token[i, :seq_len]
        keys, values = k_cache[slots].movedim(0, 1), v_cache[slots].movedim(0, 1)
        mine = queries[:, first : first + new]
        if new > 1:
            filled = torch.empty(mine.shape[0], seq_len, mine.shape[2], dtype=mine.dtype)
            filled[:, seq_len - new :] = mine
            mine = filled
        result = scaled_dot_product_attention(
            mine[None], keys[None], values[None], scale=SM_SCALE, is_causal=new > 1, enable_gqa=True
        )
        out[first : first + new] = result[0].movedim(1, 0)[-new:]
        first += new
    return out


class Setup:
    """Arenas, requests and the implementations of one case.

    Token slots are consecutive, as in a fresh server, or scattered, as after hours.
    """

    def __init__(self, case: Case, *, is_scattered: bool) -> None:
        self.generator = torch.Generator().manual_seed(42)
        shape = (GEOMETRY.num_layers, GEOMETRY.num_token_slots, GEOMETRY.num_kv_heads, GEOMETRY.head_dim)
        self.k = torch.randn(shape, generator=self.generator).bfloat16()
        self.v = torch.randn(shape, generator=self.generator).bfloat16()
        self.compiled = self.build("numba")
        self.plain = self.build("torch")
        count, new = case.num_requests, max(case.new, 1)
        compressed_len = 3000 if case.span_entries else 0
        total = compressed_len + case.cached + new
        baseline_total = case.full_tokens + new
        width = max(total, baseline_total)
        slots = 1 + torch.arange(count * width)
        if is_scattered:
            slots = torch.randperm(GEOMETRY.num_token_slots, generator=self.generator)[: count * width]
        self.req_to_token = slots.int().view(count, width).contiguous()
        spans = []
        if case.span_entries:
            for row in self.req_to_token[: 1 if case.is_shared else count]:
                spans.append(uneven_span(case.span_entries, row, self.generator))
        paths = tuple((spans[i % len(spans)],) if case.span_entries else () for i in range(count))
        self.batch = AttentionBatch(
            paths=paths,
            seq_lens=[total] * count,
            extend_lens=[new] * count if case.new else None,
            req_pool_indices=torch.arange(count),
            req_to_token=self.req_to_token,
        )
        self.baseline_lens = ([baseline_total] * count, [new] * count)
        self.q = torch.randn(30, new * count, GEOMETRY.num_qo_heads, GEOMETRY.head_dim, generator=self.generator)
        self.q = self.q.bfloat16()
        self.compiled.plan(self.batch)
        self.plain.plan(self.batch)

    def build(self, name: str) -> Attention:
        """An implementation that has seen no batch."""
        return build_attention(name, GEOMETRY, self.k, self.v)

    def numba(self, layer: int) -> Tensor:
        """One layer, compiled."""
        return self.compiled.run(layer, self.q[layer], SM_SCALE)[0]

    def torch(self, layer: int) -> Tensor:
        """One layer, in calls of PyTorch."""
        return self.plain.run(layer, self.q[layer], SM_SCALE)[0]

    def baseline(self, layer: int) -> Tensor:
        """One layer, torch_native on the uncompressed prefix."""
        return torch_native(self.q[layer], self.k[layer], self.v[layer], self.req_to_token, *self.baseline_lens)

    def plan_cold(self, layer: int) -> None:
        """Plan for a batch that has not been seen before."""
        self.build("numba").plan(self.batch)

    def plan_warm(self, layer: int) -> None:
        """Plan for the batch of the step before."""
        self.compiled.plan(self.batch)


def lower_quartile_us(calls: list[Callable[[int], object]], repeats: int, clock: Callable[[], float]) -> list[float]:
    """Time calls alternately; microseconds."""
    times: list[list[float]] = [[] for _ in calls]
    for i in range(repeats + 3):
        for call, samples in zip(calls, times, strict=True):
            start = clock()
            call(i % GEOMETRY.num_layers)
            samples.append(clock() - start)
    return [sorted(samples[3:])[repeats // 4] * 1e6 for samples in times]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=0, help="calls per row; default: 300 decode, 12 extend")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--scatter", action="store_true", help="random token slots instead of consecutive ones")
    parser.add_argument("--cpu-time", action="store_true", help="CPU time of a single thread instead of time")
    args = parser.parse_args()
    if args.cpu_time:
        torch.set_num_threads(1)
    clock = time.thread_time if args.cpu_time else time.perf_counter
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; microseconds per layer, lower quartile")
    columns = ("case", "numba", "torch", "torch_native, uncompressed", "torch / numba", "native / numba")
    print(f"| {' | '.join((*columns, 'plan', 'plan, new batch'))} |")
    print("|---|" + "--:|" * 7)
    for case in CASES:
        if args.only not in case.name:
            continue
        setup = Setup(case, is_scattered=args.scatter)
        compare("torch", case, setup.numba(3), setup.torch(3))
        if not case.span_entries:
            compare("torch_native", case, setup.numba(3), setup.baseline(3))
        repeats = args.repeats or (12 if case.new > 40 else 300)
        ours, plain, theirs = lower_quartile_us([setup.numba, setup.torch, setup.baseline], repeats, clock)
        warm, cold = lower_quartile_us([setup.plan_warm, setup.plan_cold], 12, clock)
        print(
            f"| {case.name} | {ours:.0f} | {plain:.0f} | {theirs:.0f} | {plain / ours:.1f} | {theirs / ours:.1f} "
            f"| {warm:.0f} | {cold:.0f} |",
            flush=True,
        )


def compare(name: str, case: Case, got: Tensor, want: Tensor) -> None:
    """Stop where results differ by more than roundings of bfloat16."""
    error = float((got.float() - want.float()).abs().max())
    if not error < 0.05:
        raise SystemExit(f"{case.name}: numba and {name} differ by {error}")


if __name__ == "__main__":
    main()
