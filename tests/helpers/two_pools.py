"""The harness on the pools of a model whose sliding-window layers have one of their own (gpt-oss)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, cast

import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from helpers.harness import Harness
from sgl_kvevict.attention.batch import AttentionBatch
from sgl_kvevict.attention.interface import Attention
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.sglang_adapter.span_component import FULL
from sgl_kvevict.sglang_adapter.window_component import SWA
from sgl_kvevict.sglang_adapter.window_layers import WindowLayers

WINDOW = 6
"""Tokens that a layer with a window sees before the token itself."""


class LastBatch:
    """Attention over the pool of windows that only remembers what it would read."""

    geometry = KVGeometry(2, 4, 2, 2, 1000, windows=(WINDOW + 1,) * 2)

    def plan(self, batch: AttentionBatch) -> None:
        self.batch = batch


@dataclass
class TwoPoolHarness(Harness):
    """Every token has a slot in each pool; windows are written, read back as attention does, and counted too.

    Attributes:
        num_window_slots: of the pool of the layers with a window; None: as many as the other has.
    """

    num_window_slots: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.codes = torch.zeros(self._window_slots() + 1)
        self.last = LastBatch()
        self.window_layers = WindowLayers(
            self.allocator.get_kvcache(), cast("Attention", self.last), self.rows.req_to_token
        )
        self._is_decode = False

    def _window_slots(self) -> int:
        return self.num_window_slots or self.num_slots

    def _make_pools(self) -> dict[str, Any]:
        sizes = self.num_slots, self._window_slots()
        layers = {"swa_attention_layer_ids": [0, 2], "full_attention_layer_ids": [1, 3]}
        heads = {"page_size": 1, "dtype": torch.float32, "head_num": 2, "head_dim": 2, "device": "cpu"}
        pool = SWAKVPool(*sizes, **heads, **layers)
        allocator = SWATokenToKVPoolAllocator(*sizes, 1, torch.float32, "cpu", pool, False)
        changes = {"tree_components": (FULL, SWA), "sliding_window_size": WINDOW}
        return super()._make_pools() | changes | {"token_to_kv_pool_allocator": allocator}

    def decode(self, req: Req) -> bool:
        """As the scheduler does before a step: what left the window goes, and then the lock on the prefix's window."""
        self.allocator.free_group_begin()
        if len(req.output_ids) > 1:
            self.tree.evict_sliding_windows(req, req.seqlen - 1)
        if len(req.output_ids) > WINDOW:
            self.tree.release_swa_prefix_lock(req)
        self.allocator.free_group_end()
        self.check()
        self._is_decode = True
        return super().decode(req)

    def prefill(self, req: Req, end: int | None = None) -> bool:
        self._is_decode = False
        return super().prefill(req, end)

    def evict_windows(self, num_slots: int) -> int:
        """Take windows away; return what came back, checked against the allocator."""
        before = self.allocator.swa_available_size()
        promised = self.tree.swa_evictable_size()
        released = self.tree.evict(EvictParams(swa_num_tokens=num_slots)).swa_num_tokens_evicted
        assert self.allocator.swa_available_size() - before == released >= min(num_slots, promised)
        self.check()
        return released

    def _alloc(self, count: int) -> torch.Tensor | None:
        self.allocator.evict_to_free_tokens(self.tree, count)
        self.check()
        slots = super()._alloc(count)
        if slots is not None:
            self.codes[self._paired(slots)] = float("nan")
        return slots

    def _paired(self, slots: torch.Tensor) -> torch.Tensor:
        return self.allocator.full_to_swa_index_mapping[slots.long()]

    def _write_tokens(self, req: Req, start: int, end: int, slots: torch.Tensor) -> None:
        super()._write_tokens(req, start, end, slots)
        paired = self._paired(slots)
        assert paired.gt(0).all()
        self._begin = start
        self.codes[paired] = torch.tensor(self._codes(req, end)[start:end])

    def _forward(self, req: Req, seq_len: int) -> None:
        """Read what layers with a window see from the first new token on, too."""
        super()._forward(req, seq_len)
        row = req.kv.req_pool_idx
        batch = AttentionBatch(
            paths=self.tree.read_paths([req]),
            seq_lens=[seq_len],
            extend_lens=None if self._is_decode else [seq_len - self._begin],
            req_pool_indices=torch.tensor([row]),
            req_to_token=self.rows.req_to_token,
        )
        new_slots = self.rows.req_to_token[row, self._begin : seq_len]
        self.window_layers.plan(self.tree, [req], batch, new_slots)
        first = max(0, self._begin - WINDOW)
        slots = self.last.batch.req_to_token[row, first:seq_len]
        assert slots.gt(0).all()
        assert self.codes[slots].tolist() == self._codes(req, seq_len)[first:]
        assert slots.tolist() == self.tree.window_slots(req, first, seq_len).tolist()

    def check(self) -> None:
        """The same for the slots of the windows, and for who is paired with whom."""
        super().check()
        held = Counter(self.allocator.swa_attn_allocator.free_pages.tolist())
        paired: dict[int, int] = {}
        sizes = {True: 0, False: 0}
        for node in self.tree.nodes():
            data = node.component_data[SWA]
            if data.value is None:
                continue
            held.update(data.value.tolist())
            sizes[data.lock_ref > 0] += len(data.value)
            if node not in self.tree.spans:
                paired |= dict(zip(node.component_data[FULL].value.tolist(), data.value.tolist(), strict=True))
        for req in self.live:
            if req.kv.holds_kv:
                own = self.rows.req_to_token[req.kv.req_pool_idx, req.kv.cache_protected_len : req.kv.kv_allocated_len]
                slots = self._paired(own)
                held.update(slots[slots > 0].tolist())
                paired |= {full: swa for full, swa in zip(own.tolist(), slots.tolist(), strict=True) if swa > 0}
        assert held == Counter(range(1, self._window_slots() + 1))
        mapping = self.allocator.full_to_swa_index_mapping[:-1]
        assert {full: int(mapping[full]) for full in mapping.nonzero().flatten().tolist()} == paired
        assert (self.tree.swa_protected_size(), self.tree.swa_evictable_size()) == (sizes[True], sizes[False])
