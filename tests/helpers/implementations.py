"""The implementations of attention, and how each is run beside PyTorch's in float32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.poison import poisoned_allocations
from helpers.tolerance import FLOAT32_NOISE, assert_accurate, rounding_noise
from kvevict_kernels.span_runs import SpanRuns
from sgl_kvevict.attention.batch import AttentionBatch
from sgl_kvevict.attention.cpu.numba_attention import NumbaAttention
from sgl_kvevict.attention.cpu.torch_attention import TorchAttention
from sgl_kvevict.attention.flashinfer.attention import FlashInferAttention
from sgl_kvevict.attention.triton.attention import TritonAttention

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NOISE = 4 * FLOAT32_NOISE
"""Two float32 softmaxes over up to 1,400 keys."""
TWO_ROUNDINGS = {BF16: 2.0**-8, FP32: NOISE}
"""Where two halves are rounded before they are merged, half a unit in the last place each."""
LONG_LSE_NOISE = {BF16: 1e-4, FP32: NOISE}
"""PyTorch's flash attention takes a quick exponential for 16-bit inputs: 6e-5 seen at an lse near 1."""


@dataclass(frozen=True)
class Kind:
    """An implementation and how it is tested.

    Attributes:
        make: its class.
        sizes: (KV heads, q heads of each, head_dim) of the tests of all kinds of requests.
        dtypes: of the arenas there.
        share: of the lengths there; Triton's interpreter is slow.
        fixtures: what it needs to run here.
        device: of its tensors.
        layers: those that are compared.
    """

    make: type[Any]
    sizes: tuple[tuple[int, int, int], ...]
    dtypes: tuple[torch.dtype, ...]
    share: float = 1.0
    fixtures: tuple[str, ...] = ()
    device: str = "cpu"
    layers: tuple[int, ...] = (0, 1)


ODD = ((3, 3, 64), (1, 1, 16), (2, 5, 80), (5, 7, 32), (4, 1, 128))
GROUPS = ((3, 3, 16), (2, 4, 32), (1, 8, 16), (2, 5, 80))
WIDE = ((3, 3, 64), (2, 4, 64), (1, 8, 128), (2, 7, 64))
PLAIN = Kind(TorchAttention, ODD, (BF16, FP32))
NUMBA = Kind(NumbaAttention, ODD, (BF16, FP16, FP32))
TRITON = Kind(TritonAttention, GROUPS, (BF16, FP32), 0.45, ("interpreted", "small_chunks"), layers=(1,))
CUDA = replace(TRITON, dtypes=(BF16,), fixtures=("small_chunks",), device="cuda")
FLASHINFER = Kind(FlashInferAttention, WIDE, (BF16,), 0.6, ("flashinfer_plans",))
REAL = replace(TRITON, fixtures=("interpreted",))
"""With the chunks of a GPU."""
MARKS = {"cuda": pytest.mark.gpu}
NAMES = {"plain": PLAIN, "numba": NUMBA, "triton": TRITON, "cuda": CUDA, "flashinfer": FLASHINFER}
KINDS = [pytest.param(kind, id=name, marks=MARKS.get(name, ())) for name, kind in NAMES.items()]
ON_CPU = [pytest.param(PLAIN, id="plain"), pytest.param(NUMBA, id="numba")]
ON_GPU = [pytest.param(TRITON, id="triton"), pytest.param(CUDA, id="cuda", marks=pytest.mark.gpu)]
IN_REAL_CHUNKS = [
    pytest.param(REAL, id="triton"),
    pytest.param(replace(CUDA, fixtures=()), id="cuda", marks=pytest.mark.gpu),
]


def all_sizes(*, is_extend: bool) -> list[Any]:
    """Kind, sizes and dtype; kernels for a GPU, whose decode tests have all sizes, extend at one of them."""
    return [
        pytest.param(kind, sizes, dtype, id=f"{name}-{sizes}-{dtype}", marks=MARKS.get(name, ()))
        for name, kind in NAMES.items()
        for sizes in (kind.sizes[1:2] if is_extend and kind not in (PLAIN, NUMBA) else kind.sizes)
        for dtype in kind.dtypes
    ]


@dataclass
class Runner:
    """An implementation on its device over a world's arena, spans and rows, of which a GPU has copies."""

    world: Any
    kind: Kind
    copies: dict[SpanRuns, SpanRuns] = field(default_factory=dict)

    def __post_init__(self) -> None:
        world = self.world
        if self.kind.device == "cuda" and world.dtype == FP32:
            pytest.skip("refused on a GPU; in the interpreter, float32 shows errors that rounding hides")
        k = world.k.to(self.kind.device)
        v = k[..., : world.v.shape[-1]] if world.geometry.is_latent else world.v.to(self.kind.device)
        self.attention: Any = self.kind.make(world.geometry, k, v)

    def batch(self, extend_lens: list[int] | None = None) -> AttentionBatch:
        """The world's batch, on the device; a span keeps its copy."""
        batch, device = self.world.batch(extend_lens), self.kind.device
        if device == "cpu":
            return batch
        for span in {span for path in batch.paths for span in path} - self.copies.keys():
            tensors = {one.name: x for one in fields(span) if isinstance(x := getattr(span, one.name), Tensor)}
            self.copies[span] = replace(span, **{name: x.to(device) for name, x in tensors.items()})
        return replace(
            batch,
            paths=tuple(tuple(self.copies[span] for span in path) for path in batch.paths),
            req_pool_indices=batch.req_pool_indices.to(device),
            req_to_token=batch.req_to_token.to(device),
        )

    def plan(self, extend_lens: list[int] | None = None) -> None:
        """Plan the world's batch; fresh allocations are NaN."""
        if self.kind.device != "cpu":
            self.attention.k_arena.copy_(self.world.k)
            self.attention.v_arena.copy_(self.world.v)
        with poisoned_allocations():
            self.attention.plan(self.batch(extend_lens))

    def run(self, layer: int, q: Tensor) -> tuple[Tensor, Tensor]:
        """Run a layer of what was planned; fresh allocations are NaN."""
        with poisoned_allocations():
            out, lse = self.attention.run(layer, q.to(self.kind.device), self.world.sm_scale)
        return out.cpu(), lse.cpu()

    def attend(self, layer: int, q: Tensor, extend_lens: list[int] | None = None) -> tuple[Tensor, Tensor]:
        """Plan and run one layer."""
        self.plan(extend_lens)
        return self.run(layer, q)

    def check(self, extend_lens: list[int] | None = None, noise: float | None = None, lse_noise: float = NOISE) -> None:
        """Plan on two threads, and compare layers with PyTorch's attention in float32."""
        world, kind = self.world, self.kind
        if noise is None:
            rounded = rounding_noise(world.dtype, interpreted=kind.make is TritonAttention and kind.device == "cpu")
            noise = TWO_ROUNDINGS[BF16] if kind is FLASHINFER else max(NOISE, rounded)
        with threads(2):
            self.plan(extend_lens)
        for layer in kind.layers[: world.geometry.num_layers]:
            q = world.queries(extend_lens)
            out, lse = self.run(layer, q)
            want_out, want_lse, baseline = world.expected(layer, q, extend_lens)
            assert (out.dtype, lse.dtype) == (q.dtype, FP32)
            assert_accurate("out", out, want_out, baseline, noise=noise)
            assert_accurate("lse", lse, want_lse, want_lse, noise=2 * lse_noise if kind is FLASHINFER else lse_noise)


@contextmanager
def threads(number: int) -> Iterator[None]:
    """So many threads for what is planned meanwhile; by default a worker of the test run has its share of the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def no_entries(world: Any, num_tokens: int = 1) -> SpanRuns:
    """A span of empty runs."""
    return world.span(
        torch.zeros(world.geometry.num_layers, world.geometry.num_kv_heads, dtype=torch.int32), num_tokens
    )


def add_all_kinds(world: Any, share: float = 1.0) -> None:
    """Nothing compressed; one span; a span shared by three; at other depths; only empty runs; a suffix of one."""
    shared, deep, empty = world.uneven_span(int(100 * share)), world.uneven_span(int(63 * share)), no_entries(world)
    world.add((), int(100 * share))
    world.add((world.uneven_span(int(150 * share)),), int(63 * share))
    world.add((shared, deep), 1)
    world.add((empty, world.uneven_span(5), shared), int(30 * share))
    world.add((deep, shared), 7)
    world.add((empty,), 1)
    world.add((), 1)


def add_all_prefills(world: Any, share: float = 1.0) -> list[int]:
    """New tokens alone, after a span, after cached tokens, after both; one new token; nothing but empty runs."""
    new = [int(40 * share), int(63 * share), int(20 * share), 2, 1, int(17 * share), 1]
    shared, empty = world.uneven_span(int(100 * share)), no_entries(world, 2)
    world.add((), new[0])
    world.add((shared,), new[1])
    world.add((), int(100 * share) + new[2])
    world.add((world.uneven_span(int(30 * share)), shared), int(33 * share) + new[3])
    world.add((shared,), 12)
    world.add((empty,), new[5])
    world.add((), 1)
    return new


def take(world: Any, kept: list[int]) -> None:
    """Leave only these requests."""
    for per_request in (world.paths, world.compressed_lens, world.seq_lens, world.rows):
        per_request[:] = [per_request[i] for i in kept]


def finest(kind: Kind) -> torch.dtype:
    """The dtype of KV with the least rounding that the device's kernels take."""
    return BF16 if kind.device == "cuda" else FP32
