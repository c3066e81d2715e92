"""The arena of a pool, and which layers of a model are in which of SGLang's pools."""

from __future__ import annotations

import inspect
import json
from functools import partial

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, KVWriteLoc, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from sgl_kvevict.config import ENV_VAR
from sgl_kvevict.sglang_adapter.arena import ArenaKVPool, arena_of, around_create_latent_buffers
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


def test_latents_are_rows_of_one_arena_that_begin_with_their_values(monkeypatch):
    monkeypatch.setenv(ENV_VAR, json.dumps({}))
    original = inspect.unwrap(MLATokenToKVPool._create_buffers)
    hooked = partial(around_create_latent_buffers, original)
    monkeypatch.setattr(MLATokenToKVPool, "_create_buffers", lambda pool: hooked(pool))
    pool = MLATokenToKVPool(
        size=30, page_size=1, dtype=torch.float16, kv_lora_rank=16, qk_rope_head_dim=8, layer_num=3, device="cpu",
        enable_memory_saver=False,
    )  # fmt: skip
    found = arena_of(pool)
    assert found is not None
    assert (found.k.shape, found.v.shape) == ((3, 31, 1, 24), (3, 31, 1, 16))
    layer, location = RadixAttention(4, 24, 0.25, 1, layer_id=1, v_head_dim=16), KVWriteLoc(torch.tensor([5]), None)
    pool.set_kv_buffer(layer, location, torch.arange(24.0).half().view(1, 1, 24), None)
    assert found.k[1, 5, 0].tolist() == list(range(24)) and found.v[1, 5, 0].tolist() == list(range(16))
    assert torch.equal(pool.get_value_buffer(1), found.v[1])
    pool.kv_buffer[0] = pool.kv_buffer[0].clone()
    assert arena_of(pool) is None
