"""The systems that a trace is replayed on, each for a pool of so many slots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.evict_policy import EvictionStrategy
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from helpers.learned import LearnedCompressor
from helpers.pseudo_random_policy import PseudoRandomPolicy
from helpers.statistics import random_coding
from sgl_kvevict.config import HOST_PER_POOL, Bits, KVEvictConfig
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.policies.by_name import NO_POLICY
from sgl_kvevict.segments.packer import SegmentPacker
from sgl_kvevict.segments.ranker import Compressor
from sgl_kvevict.sglang_adapter.host_memory import BLOCK_SLOTS, host_identity
from sgl_kvevict.sglang_adapter.ranks import TensorRanks
from sgl_kvevict.sglang_adapter.span_component import FULL
from sgl_kvevict.sglang_adapter.tree import KVEvictTree
from sgl_kvevict.store.host import HostSegments
from trace_bench.conversations import MAX_CONTEXT, UNIT
from trace_bench.server import MAX_RUNNING, HostTier, TreeServer

CODEC = 20
"""Compression that KVTC claims at most for a cache outside the pool."""


class HitsPerToken(EvictionStrategy):
    """The rule of SGLang's pull request 30300: fewest hits per token go first; then the least recently used."""

    def get_priority(self, node: Any) -> tuple[float, float]:
        """Priority of a leaf; the smallest is dropped first."""
        return node.hit_count / max(len(node.key), 1), node.last_access_time


@dataclass(frozen=True)
class System:
    """A named way to build a server.

    Attributes:
        name: as in tables and plots.
        build: makes it with a pool of so many slots.
    """

    name: str
    build: Callable[[int], TreeServer]


def _params(num_slots: int) -> CacheInitParams:
    rows = ReqToTokenPool(MAX_RUNNING, 2 * MAX_CONTEXT // UNIT, "cpu", False)
    return CacheInitParams(
        disable=False,
        page_size=1,
        req_to_token_pool=rows,
        token_to_kv_pool_allocator=TokenToKVPoolAllocator(num_slots, torch.float32, "cpu", None, False),
        tree_components=(FULL,),
    )


def stock(num_slots: int, *, strategy: EvictionStrategy | None = None, host: float = 0, codec: int = 1) -> TreeServer:
    """SGLang's own tree; ``host``: bytes of a modelled host tier in those of the pool."""
    params = _params(num_slots)
    if strategy is not None:  # SGLang's default core is in Rust, and has its own strategies only
        params.tree_core_backend = "python"
    tree = UnifiedRadixCache(params)
    if strategy is not None:
        tree.tree_core.eviction_strategy = strategy
    tier = HostTier(int(host * num_slots * codec), 1 / codec) if host else None
    return TreeServer(tree, params.req_to_token_pool, params.token_to_kv_pool_allocator, tier)


def ours(num_slots: int, *, bits: Bits | None = "auto", host: int = 0) -> TreeServer:
    """Our tree; ``bits`` None: nothing is compressed. Which entries are kept is random: no model is asked.

    Lengths of the configuration are the defaults, in units: a protected tail of one, sinks of none, segments of four.
    """
    params = _params(num_slots)
    geometry = KVGeometry(1, 1, 1, 128, num_slots + 1)
    k, v = (torch.zeros(geometry.arena_shape, dtype=torch.bfloat16) for _ in range(2))
    coding = random_coding(geometry, k) if bits not in (None, 16) else None
    packer = SegmentPacker(geometry, k, v, None, coding)
    defaults = KVEvictConfig()
    config = KVEvictConfig(
        policy="none" if bits is None else defaults.policy,
        bits=bits or "auto",
        tail_tokens=-(-defaults.tail_tokens // UNIT),
        sink_tokens=defaults.sink_tokens // UNIT,
        min_prefix_tokens=defaults.min_prefix_tokens // UNIT,
    )
    if bits is None:
        compressor = Compressor(config, NO_POLICY, packer)
    else:
        policy: Any = PseudoRandomPolicy()  # the part of a policy that a compressor asks
        compressor = LearnedCompressor(config, policy, packer)
    ranks = TensorRanks(None)
    identity = host_identity(config.min_prefix_tokens)
    arena = torch.empty(host * num_slots // BLOCK_SLOTS, BLOCK_SLOTS * packer.slot_bytes(), dtype=torch.uint8)
    tier = HostSegments(arena, k.device, identity, ranks.largest)
    tree = KVEvictTree(params, compressor, tier)
    return TreeServer(tree, params.req_to_token_pool, params.token_to_kv_pool_allocator)


SYSTEMS = (
    System("stock, LRU", stock),
    System("stock, hits per token", lambda slots: stock(slots, strategy=HitsPerToken())),
    System("nothing compressed", lambda slots: ours(slots, bits=None)),
    System("ours, 16 bits", lambda slots: ours(slots, bits=16)),
    System("ours", ours),
    System("stock, HiCache 2x", lambda slots: stock(slots, host=HOST_PER_POOL)),
    System("stock, HiCache 2x, codec 20x", lambda slots: stock(slots, host=HOST_PER_POOL, codec=CODEC)),
    System("ours, host 2x", lambda slots: ours(slots, host=HOST_PER_POOL)),
)
