"""A small arena with compressed spans and suffixes in it, and the attention that its index lists spell out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from helpers.implementations import Kind, Runner
from helpers.poison import poisoned_allocations
from helpers.tolerance import FLOAT32_NOISE, assert_accurate, rounding_noise
from helpers.torch_flashinfer import Plan, use_torch_kernels
from kvevict_kernels.device_limits import INTERPRETER, DeviceLimits
from kvevict_kernels.ragged_decode.chunks import extend_splits, span_chunk
from kvevict_kernels.ragged_decode.tile_table import Tile
from kvevict_kernels.row_codec import RowCoding, RowStatistics, encode_rows, write_rows
from kvevict_kernels.row_sizes import ROWS_PER_SLOT
from kvevict_kernels.span_runs import SpanRuns, compressed_len_of
from sgl_kvevict.attention.batch import AttentionBatch
from sgl_kvevict.attention.cpu.numba_attention import NumbaAttention
from sgl_kvevict.attention.cpu.torch_attention import TorchAttention
from sgl_kvevict.attention.interface import Attention
from sgl_kvevict.attention.triton.attention import TritonAttention
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.support import MAX_HEAD_DIM, Kernels

CONTEXT = 1500


class World:
    """Requests on one arena. Every row that nobody owns is NaN, and so are the rows of deleted requests.

    Token slots and head slots are handed out in random order. Slot 0 stays NaN: a filler must not be read.
    """

    def __init__(self, geometry: KVGeometry, dtype: torch.dtype) -> None:
        self.geometry = geometry
        self.dtype = dtype
        self.sm_scale = geometry.head_dim**-0.5
        shape = geometry.arena_shape
        self.k = torch.full(shape, torch.nan, dtype=dtype)
        self.v = torch.full(shape, torch.nan, dtype=dtype)
        if geometry.latent_dim:
            self.v = self.k[..., : geometry.latent_dim]
        self.free = (torch.randperm(geometry.num_token_slots - 1) + 1).tolist()
        self.req_to_token = torch.zeros(32, CONTEXT, dtype=torch.int32)
        self.free_rows = torch.randperm(32).tolist()
        self.paths: list[tuple[SpanRuns, ...]] = []
        self.compressed_lens: list[int] = []
        self.seq_lens: list[int] = []
        self.rows: list[int] = []
        self.coding: RowCoding | None = None
        self.sink_logits: Tensor | None = None

    def learn(self) -> World:
        """Make up statistics of a model, so that spans may have rows of 4 bits."""
        geometry = self.geometry
        shape = (geometry.num_layers, geometry.num_kv_heads, geometry.head_dim)
        statistics = RowStatistics(*(x for _ in "kv" for x in (torch.randn(shape), torch.randn(shape).div(2).exp())))
        self.coding = RowCoding.of(self.k, statistics)
        return self

    def span(self, lens: Tensor, num_tokens: int, start: int = 0, bits: int = 16) -> SpanRuns:
        """Pack runs of these lengths, [num_layers, num_kv_heads], into token slots of all layers, in any order.

        Their tokens are any of ``[start, start + num_tokens)``.
        """
        geometry = self.geometry
        num_entries = int(lens.sum())
        per_slot = ROWS_PER_SLOT[bits]
        num_slots = geometry.slots_for(-(-num_entries // per_slot))
        slots = torch.tensor([self.free.pop() for _ in range(num_slots)], dtype=torch.int64)
        layers = torch.arange(geometry.num_layers).view(-1, 1, 1)
        held = (layers * geometry.num_token_slots + slots.view(-1, 1)) * geometry.num_kv_heads
        held = (held + torch.arange(geometry.num_kv_heads)).flatten()
        held = (held[:, None] * per_slot + torch.arange(per_slot)).flatten()
        rows = held[torch.randperm(held.numel())[:num_entries]]
        runs = torch.arange(lens.numel()).repeat_interleave(lens.flatten())
        for is_v, arena in enumerate((self.k, self.v)):
            width = arena.shape[-1]
            numbers = torch.randn(num_entries, width)
            if bits == 16:
                arena.view(-1, width)[rows] = numbers.to(self.dtype)
                continue
            assert self.coding is not None
            mean, scale = self.coding.statistics.of_runs(runs, is_v=bool(is_v))
            write_rows(arena, rows, encode_rows(mean + scale * numbers, mean, scale), self.coding.steps(is_v))
        starts = (lens.flatten().cumsum(0) - lens.flatten()).view(lens.shape)
        kept = [torch.randperm(num_tokens)[:length].sort().values for length in lens.flatten().tolist()]
        positions = torch.cat(kept).int() + start
        return SpanRuns(rows.int(), starts.int(), lens.int(), num_tokens, positions, bits)

    def uneven_span(self, longest: int, start: int = 0, bits: int = 16) -> SpanRuns:
        """A span with runs of 0 to ``longest`` entries."""
        shape = (self.geometry.num_layers, self.geometry.num_kv_heads)
        lens = torch.randint(0, longest + 1, shape)
        return self.span(lens, num_tokens=longest + 3, start=start, bits=bits)

    def add(self, path: tuple[SpanRuns, ...], num_uncompressed: int) -> None:
        """Add a request with this path and so many tokens after it."""
        self.paths.append(path)
        self.compressed_lens.append(compressed_len_of(path))
        self.seq_lens.append(self.compressed_lens[-1])
        self.rows.append(self.free_rows.pop())
        self.grow(len(self.paths) - 1, num_uncompressed)

    def grow(self, i: int, num_tokens: int) -> None:
        """Append tokens to a request."""
        for _ in range(num_tokens):
            slot = self.free.pop()
            self.req_to_token[self.rows[i], self.seq_lens[i]] = slot
            for arena in (self.k, self.v):
                arena[:, slot] = torch.randn(arena[:, slot].shape).to(self.dtype)
            self.seq_lens[i] += 1

    def remove(self, i: int) -> None:
        """Delete a request and poison what it owned."""
        row = self.req_to_token[self.rows[i]]
        slots = row[self.compressed_lens[i] : self.seq_lens[i]].long()
        self.k[:, slots] = self.v[:, slots] = torch.nan
        self.free.extend(slots.tolist())
        row.zero_()
        for per_request in (self.paths, self.compressed_lens, self.seq_lens, self.rows):
            del per_request[i]

    def batch(self, extend_lens: list[int] | None = None) -> AttentionBatch:
        """All requests; the last tokens of each are the new ones."""
        return AttentionBatch(
            paths=tuple(self.paths),
            seq_lens=list(self.seq_lens),
            extend_lens=extend_lens,
            req_pool_indices=torch.tensor(self.rows),
            req_to_token=self.req_to_token,
        )

    def queries(self, extend_lens: list[int] | None = None) -> Tensor:
        """Random queries for the new tokens."""
        num_new = len(self.paths) if extend_lens is None else sum(extend_lens)
        return torch.randn(num_new, self.geometry.num_qo_heads, self.geometry.head_dim).to(self.dtype)

    def expected(self, layer: int, q: Tensor, extend_lens: list[int] | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Out and lse of PyTorch's attention in float32, and its out in q's dtype."""
        return *self.dense(layer, q.float(), extend_lens), self.dense(layer, q, extend_lens)[0]

    def check(
        self,
        attention: Attention,
        extend_lens: list[int] | None = None,
        noise: float = 8 * FLOAT32_NOISE,
        lse_noise: float = 8 * FLOAT32_NOISE,
    ) -> None:
        """Compare all layers with PyTorch's attention, by default of a few hundred keys; what is fresh is NaN."""
        noise = max(noise, rounding_noise(self.dtype, interpreted=isinstance(attention, TritonAttention)))
        with poisoned_allocations():
            attention.plan(self.batch(extend_lens))
        for layer in range(self.geometry.num_layers):
            q = self.queries(extend_lens)
            with poisoned_allocations():
                out, lse = attention.run(layer, q, self.sm_scale, self.sink_logits)
            want_out, want_lse, baseline = self.expected(layer, q, extend_lens)
            assert_accurate(f"out of layer {layer}", out, want_out, baseline, noise=noise)
            assert_accurate(f"lse of layer {layer}", lse, want_lse, want_lse, noise=lse_noise)

    def dense(self, layer: int, q: Tensor, extend_lens: list[int] | None = None) -> tuple[Tensor, Tensor]:
        """PyTorch's attention in the dtype of ``q``, request by request and head by head, and lse in float32."""
        outs, lses = [], []
        extend_lens = [1] * len(self.paths) if extend_lens is None else extend_lens
        first = 0
        for i, new in enumerate(extend_lens):
            for q_head in range(self.geometry.num_qo_heads):
                k, v, positions = self._seen(i, layer, q_head // self.geometry.group_size)
                mine = q[first : first + new, q_head]
                mask = self._mask(i, layer, new, positions)
                lse = (mine.float() @ k.float().T * self.sm_scale).masked_fill(~mask, -torch.inf).logsumexp(-1)
                share = torch.ones(new)
                if self.sink_logits is not None:
                    lse, before = torch.logaddexp(lse, self.sink_logits[q_head].float()), lse
                    share = torch.exp(before - lse)
                kv = (x[None, None].to(mine.dtype) for x in (k, v))
                out = scaled_dot_product_attention(mine[None, None], *kv, attn_mask=mask, scale=self.sm_scale)
                outs.append((out[0, 0] * share[:, None]).to(mine.dtype))
                lses.append(lse)
            first += new
        return self._rows(outs, extend_lens), self._rows(lses, extend_lens)

    def _mask(self, i: int, layer: int, new: int, positions: Tensor) -> Tensor:
        """[new, num_keys], what each new token of a request sees."""
        mask = torch.ones(new, len(positions), dtype=torch.bool).tril(len(positions) - new)
        window = self.geometry.window(layer)
        if not window:
            return mask
        return mask & (torch.arange(self.seq_lens[i] - new, self.seq_lens[i])[:, None] - positions < window)

    def _seen(self, i: int, layer: int, head: int) -> tuple[Tensor, Tensor, Tensor]:
        """K, V and positions of one request, layer and head: its path's runs, then its own tokens."""
        bounds = [(int(span.starts[layer, head]), int(span.lens[layer, head])) for span in self.paths[i]]
        places = [slice(start, start + length) for start, length in bounds]
        runs = [(span.rows[place].long(), span.bits) for span, place in zip(self.paths[i], places, strict=True)]
        own_positions = torch.arange(self.compressed_lens[i], self.seq_lens[i])
        slots = self.req_to_token[self.rows[i], own_positions].long()
        own = (layer * self.geometry.num_token_slots + slots) * self.geometry.num_kv_heads + head
        k, v = (
            torch.cat([self._numbers(is_v, *of_span, layer, head) for of_span in (*runs, (own, 16))]) for is_v in (0, 1)
        )
        of_runs = [span.positions[place] for span, (rows, _), place in zip(self.paths[i], runs, places, strict=True)]
        positions = torch.cat([*of_runs, own_positions])
        return k, v, positions

    def _numbers(self, is_v: int, rows: Tensor, bits: int, layer: int, head: int) -> Tensor:
        """Those of keys' rows (0) or of values' (1), float32."""
        arena = self.v if is_v else self.k
        if bits == 16:
            return arena.view(-1, arena.shape[-1])[rows].float()
        assert self.coding is not None
        runs = torch.full_like(rows, layer * self.geometry.num_kv_heads + head)
        return self.coding.load(arena, rows, runs, is_v=bool(is_v))

    def _rows(self, parts: list[Tensor], extend_lens: list[int]) -> Tensor:
        """[num_new_tokens, num_qo_heads, ...] from one part per (request, q head)."""
        heads = self.geometry.num_qo_heads
        return torch.cat([torch.stack(parts[i * heads : (i + 1) * heads], dim=1) for i in range(len(extend_lens))])


MakeWorld = Callable[..., World]
Build = Callable[[World], Attention]
Start = Callable[..., tuple[Runner, World]]


@pytest.fixture
def flashinfer_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a CPU."""
    chosen = Kernels("flashinfer", "flashinfer", "cuda")
    monkeypatch.setattr("sgl_kvevict.attention.backend.kernels_for", lambda *_, **__: chosen)


@pytest.fixture
def make_world() -> MakeWorld:
    """Factory: sizes as keywords, dtype."""

    def make(
        num_kv_heads: int = 3,
        group_size: int = 3,
        head_dim: int = 64,
        dtype: torch.dtype = torch.bfloat16,
        num_layers: int = 2,
        num_token_slots: int = 4000,
        windows: tuple[int, ...] = (),
        latent_dim: int = 0,
    ) -> World:
        num_layers = len(windows) or num_layers
        geometry = KVGeometry(
            num_layers,
            num_kv_heads * group_size,
            num_kv_heads,
            head_dim,
            num_token_slots,
            windows=windows,
            latent_dim=latent_dim,
        )
        return World(geometry, dtype)

    return make


@pytest.fixture
def interpreted() -> None:
    """Triton's interpreter runs the kernels on CPU tensors."""
    if torch.cuda.is_available():
        pytest.skip("Triton compiles for the device here; the cuda case covers it")


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Device of the tensors."""
    if request.param == "interpreter":
        request.getfixturevalue("interpreted")
        return "cpu"
    return str(request.param)


def numba(world: World) -> Attention:
    """Compiled for a CPU."""
    return NumbaAttention(world.geometry, world.k, world.v, world.coding)


def plain(world: World) -> Attention:
    """PyTorch."""
    return TorchAttention(world.geometry, world.k, world.v, world.coding)


def triton(world: World) -> Attention:
    """Kernels for a GPU."""
    return TritonAttention(world.geometry, world.k, world.v, coding=world.coding)


@pytest.fixture(params=[pytest.param(build, id=build.__name__) for build in (numba, plain, triton)])
def build(request: pytest.FixtureRequest) -> Build:
    """An implementation; Triton's kernels are interpreted, in small chunks."""
    if request.param is triton:
        request.getfixturevalue("interpreted")
        request.getfixturevalue("small_chunks")
    built: Build = request.param
    return built


@pytest.fixture
def flashinfer_plans(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """Run FlashInfer's wrappers on a CPU; every plan they make. On a GPU they compile and run their own kernels."""
    return [] if torch.cuda.is_available() else use_torch_kernels(monkeypatch)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Several chunks per run, without runs that are slow in the interpreter."""
    small = {"CHUNK_STEP": 16, "MIN_CHUNKS": (16, 32), "MAX_CHUNK": 32, "MIN_EXTEND_KEYS": 16, "EXTEND_RAMP": 4}
    for name, value in small.items():
        monkeypatch.setattr(f"kvevict_kernels.ragged_decode.chunks.{name}", value)
    monkeypatch.setattr("kvevict_kernels.ragged_decode.host_lists.MIN_CHUNKS", small["MIN_CHUNKS"])

    def tiles_for(limits: DeviceLimits, head_dim: int, **_: bool) -> tuple[Tile, Tile, Tile]:
        return Tile(16, 16, 4), Tile(64, 16, 4), Tile(128 if head_dim <= MAX_HEAD_DIM else 64, 16, 8)

    for module in ("ragged_decode.launch", "ragged_decode.triton_impl", "ragged_extend.triton_impl"):
        monkeypatch.setattr(f"kvevict_kernels.{module}.tiles_for", tiles_for)
    for planned in (span_chunk, extend_splits):
        planned.cache_clear()
    yield
    for planned in (span_chunk, extend_splits):
        planned.cache_clear()


@pytest.fixture
def many_sms(monkeypatch: pytest.MonkeyPatch, small_chunks: None) -> None:
    """A device that a few tiles do not fill."""
    limits = replace(INTERPRETER, num_sms=20)
    monkeypatch.setattr("kvevict_kernels.ragged_decode.launch.limits_of", lambda device: limits)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(42)


@pytest.fixture
def start(make_world: MakeWorld, request: pytest.FixtureRequest) -> Start:
    """Factory: a kind, then sizes of a world, which is empty."""

    def started(kind: Kind, *args: int, **kwargs: object) -> tuple[Runner, World]:
        for name in kind.fixtures:
            request.getfixturevalue(name)
        world = make_world(*args, **kwargs)
        return Runner(world, kind), world

    return started
