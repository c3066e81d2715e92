"""The arena of a pool."""

from __future__ import annotations

import inspect
import json
from functools import partial

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MLATokenToKVPool

from sgl_kvevict.config import ENV_VAR
from sgl_kvevict.sglang_adapter.arena import ArenaLatentPool, arena_of, around_create_latent_buffers


@pytest.mark.parametrize("is_stock", [False, True])
def test_latents_are_rows_of_one_arena_that_begin_with_their_values(monkeypatch, is_stock):
    """The pool of our CPU platform, and SGLang's own with the hook, as on a GPU."""
    monkeypatch.setenv(ENV_VAR, json.dumps({}))
    if is_stock:
        original = inspect.unwrap(MLATokenToKVPool._create_buffers)
        hooked = partial(around_create_latent_buffers, original)
        monkeypatch.setattr(MLATokenToKVPool, "_create_buffers", lambda pool: hooked(pool))
    pool = (MLATokenToKVPool if is_stock else ArenaLatentPool)(
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
