"""Finds SGLang's full-attention and sliding-window pools, their layers, and the size of a recurrent state."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, KVCache
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from torch import Tensor

if TYPE_CHECKING:
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

MAMBA = ComponentType.MAMBA


def full_pool_of(pool: KVCache) -> KVCache:
    """Return the full-attention pool: the pool itself, or its part if SGLang combines several."""
    # The exact types: a subclass may lay out its layers in another way, and is refused at the start.
    return pool.full_kv_pool if type(pool) in (SWAKVPool, HybridLinearKVPool) else pool


def full_layers_of(pool: KVCache) -> dict[int, int]:
    """Return the full-attention layers as {layer number in the model: index in the arena}."""
    if type(pool) is SWAKVPool:
        return {layer: place for layer, (place, has_window) in pool.layers_mapping.items() if not has_window}
    if type(pool) is HybridLinearKVPool:
        return dict(pool.full_attention_layer_id_mapping)
    return {pool.start_layer + place: place for place in range(pool.layer_num)}


def window_pool_of(pool: KVCache) -> KVCache | None:
    """Return the separate pool of the sliding-window layers, or None."""
    return pool.swa_kv_pool if type(pool) is SWAKVPool else None


def window_layers_of(pool: KVCache) -> dict[int, int]:
    """Return the layers of the sliding-window pool as {layer number in the model: index in the pool}."""
    if type(pool) is not SWAKVPool:
        return {}
    return {layer: place for layer, (place, has_window) in pool.layers_mapping.items() if has_window}


def state_slots(params: CacheInitParams, k_arena: Tensor) -> Callable[[UnifiedTreeNode], float | None] | None:
    """Return a function that converts the memory of a node's recurrent state to token slots; None without such layers.

    The function returns None for a node without a state. ``k_arena``: see :class:`Arena`; V has the same size.
    """
    if MAMBA not in params.tree_components:
        return None
    states = params.req_to_token_pool.mamba_pool.mamba_cache
    bytes_per_slot = 2 * k_arena.numel() // k_arena.shape[1] * k_arena.element_size()
    # Dimension 1 of a state's tensors counts states, dimension 0 layers.
    num_slots = float(states.mem_usage_bytes() / states.temporal.shape[1] / bytes_per_slot)
    return lambda node: None if node.component_data[MAMBA].value is None else num_slots
