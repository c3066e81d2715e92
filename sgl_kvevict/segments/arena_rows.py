"""Rows of the KV arena, by head slot and by token slot."""

from __future__ import annotations

import torch
from torch import Tensor

from kvevict_kernels.row_sizes import head_slot_of
from sgl_kvevict.geometry import KVGeometry


class ArenaRows:
    """Rows of one arena.

    Arenas are [num_layers, num_token_slots, num_kv_heads, head_dim].
    Values that are a part of the keys' rows (``geometry.latent_dim``) move with them; copies of them have no columns.
    """

    def __init__(self, geometry: KVGeometry, k_arena: Tensor, v_arena: Tensor) -> None:
        self.geometry = geometry
        self.k_arena = k_arena
        self.v_arena = v_arena
        self._moved = k_arena, v_arena[..., : geometry.own_value_dim]

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values."""
        return self.k_arena.shape[:3].numel() * self.geometry.entry_dim * self.k_arena.element_size()


def entries_of_tokens(geometry: KVGeometry, token_slots: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor]:
    """All entries of uncompressed tokens, in ``token_slots``, [num_tokens], int64, from the position ``start`` on.

    Returns head slots and positions, [num_runs * num_tokens], int32, run after run, and [num_runs + 1], int32, where
    each run starts.
    """
    num_tokens, device = token_slots.numel(), token_slots.device
    runs = torch.arange(geometry.num_runs + 1, dtype=torch.int32, device=device)
    layers, heads = runs[:-1, None] // geometry.num_kv_heads, runs[:-1, None] % geometry.num_kv_heads
    sizes = geometry.num_token_slots, geometry.num_kv_heads
    head_slots: Tensor = head_slot_of(layers, token_slots.int(), heads, *sizes)  # all numbers fit int32
    positions = torch.arange(start, start + num_tokens, dtype=torch.int32, device=device)
    return head_slots.flatten(), positions.repeat(geometry.num_runs), runs * num_tokens
