"""Which layers of a model are in which of SGLang's pools, and what is refused of models with several."""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from helpers.settings import refused, settings
from sgl_kvevict.config import KVEvictConfig
from sgl_kvevict.policies import build_policy
from sgl_kvevict.sglang_adapter.arena import ArenaKVPool, arena_of
from sgl_kvevict.sglang_adapter.kv_pools import full_layers_of, full_pool_of, window_layers_of, window_pool_of

HEADS = {"page_size": 1, "dtype": torch.float32, "head_num": 2, "head_dim": 4, "device": "cpu"}


def test_full_layers_beside_windows_have_an_arena_of_their_own():
    layers = {"swa_attention_layer_ids": [0, 2, 4], "full_attention_layer_ids": [1, 3]}
    pool = SWAKVPool(30, 20, **HEADS, **layers, token_to_kv_pool_class=ArenaKVPool)
    arena, windows = arena_of(full_pool_of(pool)), arena_of(window_pool_of(pool))
    assert arena is not None and arena.k.shape == (2, 31, 2, 4)
    assert windows is not None and windows.k.shape == (3, 21, 2, 4)
    assert full_layers_of(pool) == {1: 0, 3: 1}
    assert window_layers_of(pool) == {0: 0, 2: 1, 4: 2}
    assert pool.get_key_buffer(3).data_ptr() == arena.k[1].data_ptr()


def test_full_layers_beside_recurrent_ones_have_an_arena():
    pool = HybridLinearKVPool(
        30, **HEADS, full_attention_layer_ids=[3, 7], mamba_pool=None, full_kv_pool_class=ArenaKVPool
    )
    arena = arena_of(full_pool_of(pool))
    assert arena is not None and arena.k.shape == (2, 31, 2, 4)
    assert full_layers_of(pool) == {3: 0, 7: 1}
    assert window_pool_of(pool) is None and window_layers_of(pool) == {}
    assert pool.get_value_buffer(7).data_ptr() == arena.v[1].data_ptr()


def test_layers_of_one_pool_are_in_their_order():
    pool = ArenaKVPool(size=30, **HEADS, layer_num=3, enable_memory_saver=False, start_layer=2)
    assert full_pool_of(pool) is pool
    assert full_layers_of(pool) == {2: 0, 3: 1, 4: 2}


WINDOWS, STATES = {"windows_class": ("ArenaKVPool", True)}, {"has_states": True}


def test_what_two_pools_rule_out_is_named():
    assert refused(**WINDOWS) == refused(None, build_policy("snapkv", {}), **WINDOWS) == []
    (reason,) = refused(**WINDOWS, has_full_layers=False)
    assert reason.startswith("every layer of the model has a sliding window")
    (reason,) = refused(KVEvictConfig(store="file:///tmp/prefixes"), **WINDOWS)
    assert reason.startswith("store: the model has a KV pool for layers with a sliding window")
    (reason,) = refused(KVEvictConfig(host_bytes=10**9), **WINDOWS)
    assert reason.startswith("host_bytes: the model has a KV pool for layers with a sliding window")
    assert refused(KVEvictConfig(host_bytes=0), **WINDOWS) == []


def test_what_recurrent_layers_rule_out_is_named():
    assert refused(**STATES) == []
    (reason,) = refused(own=settings(mamba_radix_cache_strategy="extra_buffer_lazy"), **STATES)
    assert reason.startswith("--mamba-radix-cache-strategy is 'extra_buffer_lazy', allowed are 'no_buffer' and")
    (reason,) = refused(own=settings(speculative_algorithm="NGRAM"), **STATES)
    assert reason.startswith("--speculative-algorithm: the model has recurrent layers")
