"""Layers whose windows have a KV pool of their own: prefill, eager and captured steps against dense attention."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from torch import Tensor

from helpers.graph_tape import GraphTape, recorded
from helpers.tolerance import FLOAT32_NOISE, assert_accurate
from sgl_kvevict.attention.batch import AttentionBatch
from sgl_kvevict.attention.cpu.torch_attention import TorchAttention
from sgl_kvevict.attention.interface import Attention
from sgl_kvevict.attention.triton.attention import TritonAttention
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.sglang_adapter.window_layers import WindowLayers

pytestmark = [
    pytest.mark.usefixtures("small_chunks"),
    pytest.mark.filterwarnings("ignore:All-NaN"),  # requests that only fill up read slot 0
]

WINDOW = 20
"""Tokens that a query sees, itself included."""
HEADS, KV_HEADS, DIM = 4, 2, 16
SM_SCALE = DIM**-0.5
LAYERS = [SimpleNamespace(layer_id=layer, scaling=SM_SCALE) for layer in (0, 2)]
"""Those with a window, of a model of four layers."""


class Requests:
    """Requests of a model with two pools, their keys and values, and a tree that knows their slots.

    Window slots that nobody owns hold NaN.
    """

    def __init__(self, attention: type[Attention], device: str) -> None:
        layers = {"swa_attention_layer_ids": [0, 2], "full_attention_layer_ids": [1, 3]}
        heads = {"page_size": 1, "dtype": torch.float32, "head_num": KV_HEADS, "head_dim": DIM, "device": device}
        self.pool = SWAKVPool(400, 300, **heads, **layers)
        self.allocator = SWATokenToKVPoolAllocator(400, 300, 1, torch.float32, device, self.pool, False)
        windows = self.pool.swa_kv_pool
        self.kv = torch.full((2, 2, *windows.k_buffer[0].shape), torch.nan, device=device)
        windows.k_buffer, windows.v_buffer = (list(one) for one in self.kv)
        geometry = KVGeometry(2, HEADS, KV_HEADS, DIM, self.kv.shape[2], windows=(WINDOW, WINDOW))
        self.rows = torch.zeros(8, 200, dtype=torch.int32, device=device)
        self.sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], device=device)
        self.window_layers = WindowLayers(self.pool, attention(geometry, *self.kv), self.rows)
        self.live: list[Any] = []

    def window_slots(self, req: Any, start: int, end: int) -> Tensor:
        """As a tree answers it in which nothing is compressed."""
        mapping: Tensor = self.allocator.full_to_swa_index_mapping
        return mapping[self.rows[req.kv.req_pool_idx, start:end].long()]

    def start(self, row: int, num_cached: int = 0) -> None:
        """A request takes a row, which others may have had before, and finds so many tokens in the cache."""
        known = torch.randn(2, 2, num_cached, KV_HEADS, DIM).to(self.rows.device)
        slots = self.allocator.alloc(num_cached)
        self.rows[row, :num_cached] = slots.int()
        self.kv[:, :, self.allocator.full_to_swa_index_mapping[slots]] = known.transpose(0, 1)
        kv = SimpleNamespace(req_pool_idx=row)
        self.live.append(SimpleNamespace(kv=kv, last_node=object(), seq_len=num_cached, known=known))

    def end(self, req: Any) -> None:
        """It leaves."""
        slots = self.rows[req.kv.req_pool_idx, : req.seq_len].long()
        self.kv[:, :, self.allocator.full_to_swa_index_mapping[slots]] = torch.nan
        self.allocator.free(slots)
        self.live.remove(req)

    def grow(self, counts: list[int], *, is_decode: bool) -> tuple[AttentionBatch, Tensor, Tensor, Tensor]:
        """Give every request new tokens: the batch, their slots, and of both layers queries, and keys and values."""
        slots = self.allocator.alloc(sum(counts))
        queries = torch.randn(2, sum(counts), HEADS, DIM).to(self.rows.device)
        new_kv = torch.randn(2, 2, sum(counts), KV_HEADS, DIM).to(self.rows.device)
        first = 0
        for req, count in zip(self.live, counts, strict=True):
            part = slice(first, first + count)
            self.rows[req.kv.req_pool_idx, req.seq_len : req.seq_len + count] = slots[part].int()
            req.known = torch.cat([req.known, new_kv[:, :, part]], dim=2)
            req.seq_len += count
            first += count
        lens = [req.seq_len for req in self.live]
        rows = torch.tensor([req.kv.req_pool_idx for req in self.live], device=self.rows.device)
        batch = AttentionBatch(((),) * len(lens), lens, None if is_decode else counts, rows, self.rows)
        return batch, slots, queries, new_kv

    def prefill(self, counts: list[int]) -> None:
        """An eager forward, compared."""
        self.forward(counts, is_decode=False)

    def decode(self) -> None:
        """An eager step, compared."""
        self.forward([1] * len(self.live), is_decode=True)

    def forward(self, counts: list[int], *, is_decode: bool) -> None:
        batch, slots, queries, new_kv = self.grow(counts, is_decode=is_decode)
        self.window_layers.plan(self, self.live, batch, slots)  # type: ignore[arg-type]
        for place in range(2):
            out = self.attend(place, queries[place], new_kv[place], slots)
            self.check(place, queries[place], counts, out)

    def attend(self, place: int, queries: Tensor, new_kv: Tensor, slots: Tensor) -> Tensor:
        """One layer as planned: store, and attend."""
        kv = (new_kv[0], new_kv[1])
        return self.window_layers.attend(LAYERS[place], queries, kv, slots, self.sinks)  # type: ignore[arg-type]

    def check(self, place: int, queries: Tensor, counts: list[int], out: Tensor) -> None:
        """Compare one layer with dense attention over what each query's window shows, the sink as one key more."""
        wanted, first = [], 0
        for req, count in zip(self.live, counts, strict=True):
            k, v = (rows.repeat_interleave(HEADS // KV_HEADS, dim=1) for rows in req.known[place])
            for row in range(count):
                end = req.seq_len - count + row + 1
                seen = slice(max(0, end - WINDOW), end)
                scores = torch.einsum("hd,khd->hk", queries[first + row], k[seen]) * SM_SCALE
                weights = torch.cat([scores, self.sinks[:, None]], dim=1).softmax(-1)[:, :-1]
                wanted.append(torch.einsum("hk,khd->hd", weights, v[seen]))
            first += count
        want = torch.stack(wanted)
        assert_accurate(f"out of layer {place}", out, want, want, noise=2 * FLOAT32_NOISE)


class CapturedSteps:
    """A recorded decode step of all layers with a window, for so many requests."""

    def __init__(self, requests: Requests, size: int) -> None:
        self.requests, self.size = requests, size
        device = requests.rows.device
        self.seq_lens = torch.ones(size, dtype=torch.int64, device=device)
        self.rows = torch.zeros(size, dtype=torch.int64, device=device)
        self.slots = torch.zeros(size, dtype=torch.int64, device=device)
        self.queries = torch.zeros(2, size, HEADS, DIM, device=device)
        self.new_kv = torch.zeros(2, 2, size, KV_HEADS, DIM, device=device)
        requests.window_layers.start_capture(size)
        self.outs, self._replay = recorded(self._step, GraphTape(), device.type)

    def _step(self) -> list[Tensor]:
        requests = self.requests
        requests.window_layers.start_step(self.seq_lens, self.rows, self.slots)
        return [requests.attend(i, self.queries[i], self.new_kv[i], self.slots) for i in range(2)]

    def decode(self) -> None:
        """A replay for all live requests, filled up, compared with dense attention."""
        requests = self.requests
        count = len(requests.live)
        batch, slots, queries, new_kv = requests.grow([1] * count, is_decode=True)
        self.seq_lens.fill_(1)[:count] = torch.tensor(batch.seq_lens)
        self.rows.zero_()[:count] = batch.req_pool_indices
        self.slots.zero_()[:count] = slots
        self.queries[:, :count], self.new_kv[:, :, :count] = queries, new_kv
        requests.window_layers.follow(requests, requests.live, batch, self.size)  # type: ignore[arg-type]
        self._replay()
        for place, out in enumerate(self.outs):
            requests.check(place, queries[place], [1] * count, out[:count])


@pytest.mark.parametrize("attention", [TorchAttention, TritonAttention])
def test_prompts_in_chunks_and_steps_see_their_windows(attention: type[Attention], interpreted: None) -> None:
    """Shorter than a window, longer, and cut within one; found in the cache, in a row that others had before."""
    requests = Requests(attention, "cpu")
    for row in (3, 1):
        requests.start(row)
    requests.prefill([50, 7])
    requests.prefill([5, 30])
    requests.decode()
    requests.end(requests.live[0])
    requests.start(3, num_cached=45)
    requests.prefill([1, 2])
    for _ in range(2):
        requests.decode()


def test_captured_steps_see_the_windows_of_who_runs(device: str) -> None:
    """Requests of any length enter and leave; eager steps come between; a batch comes again; all places are taken."""
    requests = Requests(TritonAttention, device)
    captured = CapturedSteps(requests, 4)
    requests.start(5)
    requests.prefill([33])
    for _ in range(3):
        captured.decode()
    requests.start(2)
    requests.prefill([1, 4])
    captured.decode()
    requests.decode()
    captured.decode()
    requests.end(requests.live[0])
    for row, num_cached in ((5, 40), (7, 0), (1, 3)):
        requests.start(row, num_cached)
    requests.prefill([1, 2, 60, 19])
    for _ in range(2):
        captured.decode()
