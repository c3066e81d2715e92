"""Sizes of the KV cache and the arithmetic between token slots and head slots."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KVGeometry:
    """Sizes of one KV arena, per tensor-parallel rank.

    The arena holds K (and V) as ``[num_layers, num_token_slots, num_kv_heads, head_dim]``. One *token slot* is a
    row of every layer; one *head slot* is one K row and one V row, numbered
    ``(layer * num_token_slots + token_slot) * num_kv_heads + lane``.

    Raises:
        ValueError: a size is not positive, query heads do not divide into KV heads, or head slots overflow int32.
    """

    num_layers: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    num_token_slots: int

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_qo_heads", "num_kv_heads", "head_dim", "num_token_slots"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.num_qo_heads % self.num_kv_heads:
            raise ValueError(
                f"num_qo_heads must be a multiple of num_kv_heads, got {self.num_qo_heads} and {self.num_kv_heads}"
            )
        if self.num_head_slots > 2**31 - 1:
            raise ValueError(f"head slot ids must fit int32, got {self.num_head_slots} head slots")

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_qo_heads // self.num_kv_heads

    @property
    def heads_per_token(self) -> int:
        """Head slots in one token slot (all layers and KV heads)."""
        return self.num_layers * self.num_kv_heads

    @property
    def num_head_slots(self) -> int:
        """Head slots in the whole arena."""
        return self.num_token_slots * self.heads_per_token

    def slots_for(self, num_entries: int) -> int:
        """Token slots that ``num_entries`` packed entries take: ``ceil(num_entries / heads_per_token)``."""
        return -(-num_entries // self.heads_per_token)
