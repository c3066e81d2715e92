"""The harness on the pools of a model with recurrent layers: one state a request, and states in the tree."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.allocation import ensure_mamba_capacity
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool

from helpers.harness import Harness
from sgl_kvevict.sglang_adapter.kv_pools import MAMBA
from sgl_kvevict.sglang_adapter.span_component import FULL

SHAPE = Mamba2StateShape(
    conv=[(2, 3)],
    temporal=(1, 2, 2),
    intermediate_size=2,
    conv_dim=2,
    ssm_state_size=2,
    num_heads=1,
    head_dim=2,
    state_size=2,
    conv_kernel=4,
)


@dataclass
class StatesHarness(Harness):
    """A state names all tokens that went into it; it is copied, taken over, read back and counted.

    Attributes:
        num_states: of the pool of states; a running request needs one, and one more where it is cached.
        interval: see :class:`SnapshotsHarness`; 0: the tree gets copies of a request's state.
    """

    num_states: int = 24
    interval: int = 0

    def _compresses_answers(self) -> bool:
        return False

    def _make_pools(self) -> dict[str, Any]:
        dtypes = Mamba2StateDType(conv=torch.float32, temporal=torch.float32)
        rows = HybridReqToTokenPool(
            size=self.num_rows,
            mamba_size=self.num_states,
            mamba_spec_state_size=0,
            max_context_len=512,
            device="cpu",
            enable_memory_saver=False,
            cache_params=Mamba2CacheParams(shape=SHAPE, dtype=dtypes, layers=[0, 2]),
            mamba_layer_ids=[0, 2],
            enable_mamba_extra_buffer=self.interval > 0,
            enable_overlap_schedule=self.interval > 0,
        )
        return super()._make_pools() | {"req_to_token_pool": rows, "tree_components": (FULL, MAMBA)}

    @property
    def _states(self) -> torch.Tensor:
        """[num_states + 1]; one number of each state."""
        return self.rows.mamba_pool.mamba_cache.temporal[0, :, 0, 0, 0]

    def _snapshots_of(self, req: Req) -> list[int]:
        """Further states that a request holds."""
        return []

    def evict_states(self, count: int) -> int:
        """Take states away; return how many came back, checked against the allocator."""
        before = self.rows.mamba_allocator.available_size()
        promised = self.tree.mamba_evictable_size()
        released = self.tree.evict(EvictParams(num_tokens=0, mamba_num=count)).mamba_num_evicted
        assert self.rows.mamba_allocator.available_size() - before == released >= min(count, promised)
        self.check()
        return released

    def prefill(self, req: Req, end: int | None = None) -> bool:
        if not req.kv.holds_kv:
            ensure_mamba_capacity(self.rows, [req], self.tree)
        return super().prefill(req, end)

    def flush(self) -> None:
        self.rows.clear()
        super().flush()

    def _cancel(self, req: Req) -> None:
        if not req.kv.holds_kv:
            release_kv_cache(req, self.tree, checkpoint=False)
        super()._cancel(req)

    def _write_tokens(self, req: Req, start: int, end: int, slots: torch.Tensor) -> None:
        super()._write_tokens(req, start, end, slots)
        self._begin = start

    def _forward(self, req: Req, seq_len: int) -> None:
        """Bring the request's state to where it begins, check that it is there, and go on to ``seq_len``."""
        super()._forward(req, seq_len)
        pool, kv = self.rows.mamba_pool, req.kv
        slot = kv.mamba_pool_idx.unsqueeze(0)
        if kv.mamba_cow_src_index is not None:
            pool.copy_from(kv.mamba_cow_src_index, slot)
        elif kv.mamba_needs_clear:
            pool.clear_slots(slot)
        kv.mamba_cow_src_index, kv.mamba_needs_clear = None, False
        codes = [0.0, *self._codes(req, seq_len)]
        assert float(self._states[slot]) == codes[self._begin]
        pool.mamba_cache.temporal[:, slot] = codes[seq_len]

    def check(self) -> None:
        """The same for states: those of the tree name the tokens up to their node's end."""
        super().check()
        held = Counter(self.rows.mamba_allocator.free_slots.tolist())
        sizes = {True: 0, False: 0}
        for node in self.tree.nodes():
            data = node.component_data[MAMBA]
            if data.value is not None:
                held.update(data.value.tolist())
                sizes[data.lock_ref > 0] += 1
        for req in self.live:
            if req.kv.holds_mamba:
                held.update([int(req.kv.mamba_pool_idx), *self._snapshots_of(req)])
        assert held == Counter(range(1, self.num_states + 1))
        assert (self.tree.mamba_protected_size(), self.tree.mamba_evictable_size()) == (sizes[True], sizes[False])


@dataclass
class SnapshotsHarness(StatesHarness):
    """States are snapshots (`extra_buffer`): a request has two beside its own, and the tree gets the newer one.

    Attributes:
        interval: tokens between snapshots, from the beginning of a prefill, or of the text when it decodes.
    """

    num_states: int = 40
    interval: int = 4

    def _make_pools(self) -> dict[str, Any]:
        return super()._make_pools() | {"enable_mamba_extra_buffer": True}

    def _snapshots_of(self, req: Req) -> list[int]:
        buffer = req.kv.mamba_ping_pong_track_buffer
        return [] if buffer is None else buffer.tolist()

    def _forward(self, req: Req, seq_len: int) -> None:
        """Take a snapshot where SGLang's scheduler lets its kernels take one."""
        super()._forward(req, seq_len)
        start = self._begin if seq_len - self._begin > 1 else 0
        at = start + (seq_len - start) // self.interval * self.interval
        if at <= self._begin:
            return
        kv = req.kv
        self._states[kv.mamba_ping_pong_track_buffer[kv.mamba_next_track_idx]] = self._codes(req, at)[-1]
        kv.mamba_last_track_idx = kv.mamba_next_track_idx
        kv.mamba_next_track_idx = self.rows.get_mamba_ping_pong_other_idx(kv.mamba_next_track_idx)
        kv.mamba_prev_track_seqlen, kv.mamba_last_track_seqlen = kv.mamba_last_track_seqlen, at
