"""The KV arena: K (and V) of all layers in one tensor, so any lane can hold an entry of any (layer, head)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.mem_cache.memory_pool import KVCache, MHATokenToKVPool, MLATokenToKVPool
from torch import Tensor

from sgl_kvevict.sglang_adapter.settings import published
from sgl_kvevict.support import BACKEND_NAME


@dataclass(frozen=True)
class Arena:
    """K and V of one KV pool: [num_layers, num_token_slots, num_kv_heads, head_dim], the pool's dtype.

    ``pool.k_buffer[l]`` is ``k[l]`` (as uint8 if the pool stores float8 that way); ``v`` likewise. With latent
    attention ``pool.kv_buffer[l]`` is ``k[l]``, and ``v`` the first columns of ``k``.
    """

    k: Tensor
    v: Tensor


def kvevict_is_selected() -> bool:
    """Whether the server was started with ``--radix-cache-backend kvevict``."""
    return bool(published("radix_cache_backend") == BACKEND_NAME)


def _zeros(pool: KVCache, *shape: int) -> Tensor:
    """[num_layers, *shape], in the memory regions that SGLang uses for KV."""
    mem_pool = torch.cuda.use_mem_pool(pool.custom_mem_pool) if pool.custom_mem_pool else nullcontext()
    with pool.memory_saver_adapter.region(GPU_MEMORY_TYPE_KV_CACHE), mem_pool:
        return torch.zeros((pool.layer_num, *shape), dtype=pool.store_dtype, device=pool.device)


def create_arena_buffers(pool: MHATokenToKVPool) -> None:
    """Create ``k_buffer`` and ``v_buffer`` as views of one NHD arena."""
    k, v = (_zeros(pool, *shape) for shape in pool._kv_buffer_shapes())
    # SGLang stores float8 as uint8; our kernels read the numbers.
    pool.kvevict_arena = Arena(k.view(pool.dtype), v.view(pool.dtype))
    pool.k_buffer = list(k.unbind(0))
    pool.v_buffer = list(v.unbind(0))


def arena_of(pool: KVCache) -> Arena | None:
    """Return the arena of a pool, or None if the pool's buffers are not views of one."""
    arena: Arena | None = getattr(pool, "kvevict_arena", None)
    if arena is None:
        return None
    latents = getattr(pool, "kv_buffer", None)
    stored = ((pool.k_buffer, arena.k), (pool.v_buffer, arena.v)) if latents is None else ((latents, arena.k),)
    # If other buffers were put in their place since, entries moved in the arena would be read by no layer.
    if any(
        buffer.data_ptr() != plane.data_ptr()
        for buffers, planes in stored
        for buffer, plane in zip(buffers, planes, strict=True)
    ):
        return None
    return arena


class ArenaKVPool(MHATokenToKVPool):
    """Stock pool with arena buffers, for platforms that can choose the pool class."""

    _create_buffers_normal = create_arena_buffers

    def _init_kv_copy_and_warmup(self) -> None:
        """Move rows of accepted draft tokens by torch; SGLang would compile a kernel."""
        self._kv_copy_config = None
        self.use_native_move_kv_cache = True


def around_create_buffers(original: Callable[[MHATokenToKVPool], None], pool: MHATokenToKVPool) -> None:
    """Hook around the stock pool's buffer creation: use an arena if our backend is selected and the layout is NHD.

    Other pool classes (speculative drafts, quantised, hybrid) keep their buffers; the start-up check refuses them.
    """
    if type(pool) is MHATokenToKVPool and pool.kv_cache_layout == "nhd" and kvevict_is_selected():
        create_arena_buffers(pool)
    else:
        original(pool)


def around_create_latent_buffers(original: Callable[[MLATokenToKVPool], None], pool: MLATokenToKVPool) -> None:
    """Hook around the stock pool of latents, as :func:`around_create_buffers`; DSA's and FP4's pools keep their own.

    There is one row per token and layer, whose beginning is the value.
    """
    if type(pool) is not MLATokenToKVPool or pool.use_dsa or not kvevict_is_selected():
        original(pool)
        return
    rows = _zeros(pool, pool.size + pool.page_size, 1, pool.kv_cache_dim)
    stored = rows.view(pool.dtype)
    # Values are a view of the keys, so moving a key moves its value.
    pool.kvevict_arena = Arena(stored, stored[..., : pool.kv_lora_rank])
    pool.kv_buffer = list(rows.unbind(0))
