"""Which layers of a model are in which of SGLang's pools, and what is refused of models with several."""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

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
    assert full_pool_of(pool) is pool and arena_of(pool).k.shape == arena_of(pool).v.shape == (3, 31, 2, 4)
    assert full_layers_of(pool) == {2: 0, 3: 1, 4: 2}
