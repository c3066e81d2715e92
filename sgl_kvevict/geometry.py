"""Sizes of the KV cache, the arithmetic between token slots and head slots, and FP8 scales."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from kvevict_kernels.row_sizes import ROWS_PER_SLOT

INDEX_BYTES = 6
"""Of an entry outside the pool, beside its row: its position (4) and the key of its order (2)."""
ENTRY_BYTES = INDEX_BYTES + 4
"""Of an entry on the pool's device, beside the pool: also the number of its row."""


@dataclass(frozen=True)
class KVScales:
    """FP8 scales of keys and values per layer: the value of a stored 1. Empty: all 1.0, as for other dtypes.

    Fixed at the server's start, even if its weights change: rows are written and read with the same scales.
    ValueError: a scale is not a finite number > 0.
    """

    k: tuple[float, ...] = ()
    v: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for scale in (*self.k, *self.v):
            if not math.isfinite(scale) or scale <= 0:
                raise ValueError(f"a scale must be a finite number > 0, got {scale}")

    def of(self, layer: int) -> tuple[float, float]:
        """Return the scales of a layer's keys and values."""
        return (self.k[layer], self.v[layer]) if self.k else (1.0, 1.0)


UNSCALED = KVScales()


@dataclass(frozen=True)
class KVGeometry:
    """Sizes of one KV arena, per tensor-parallel rank.

    The arena holds K (and V) as ``[num_layers, num_token_slots, num_kv_heads, head_dim]``. One *token slot* is a
    row of every layer; one *head slot* is one K row and one V row, numbered
    ``(layer * num_token_slots + token_slot) * num_kv_heads + lane``.

    Attributes:
        windows: sliding window of each layer: a query at ``p`` sees the tokens ``(p - window, p]``; 0: all before it.
            Empty: no layer has a window.
        latent_dim: width of the values, if they are the first numbers of the keys' rows (latent attention, MLA); 0:
            values have rows of their own, as wide as keys.
        itemsize: bytes of a number in the arena.

    Raises:
        ValueError: a size is not positive, query heads do not divide into KV heads, head slots overflow int32, or a
            latent is wider than keys.
    """

    num_layers: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    num_token_slots: int
    scales: KVScales = UNSCALED
    windows: tuple[int, ...] = ()
    latent_dim: int = 0
    itemsize: int = 2

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_qo_heads", "num_kv_heads", "head_dim", "num_token_slots"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.num_qo_heads % self.num_kv_heads:
            raise ValueError(
                f"num_qo_heads must be a multiple of num_kv_heads, got {self.num_qo_heads} and {self.num_kv_heads}"
            )
        # Kernels read head slots as int32: twice as many indices fit a cache as with int64.
        if self.num_head_slots > 2**31 - 1:
            raise ValueError(f"head slot ids must fit int32, got {self.num_head_slots} head slots")
        if not 0 <= self.latent_dim <= self.head_dim:
            raise ValueError(f"latent_dim: expected 0 to {self.head_dim} (head_dim), got {self.latent_dim}")

    @property
    def is_latent(self) -> bool:
        """Whether values are a part of the keys' rows."""
        return self.latent_dim > 0

    @property
    def v_head_dim(self) -> int:
        """Width of values."""
        return self.latent_dim or self.head_dim

    @property
    def own_value_dim(self) -> int:
        """Numbers of a value that are not in its key's row: what moves, and is stored, beside the key."""
        return 0 if self.is_latent else self.head_dim

    @property
    def entry_dim(self) -> int:
        """Numbers of an entry: its key, and its value unless that is a part of the key's row."""
        return self.head_dim + self.own_value_dim

    @property
    def slot_bytes(self) -> int:
        """Bytes of a token slot: keys and values of all layers and heads."""
        return self.num_runs * self.entry_dim * self.itemsize

    @cached_property
    def has_windows(self) -> bool:
        """Whether some layer has a sliding window."""
        return any(self.windows)

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Layers without a window, in order."""
        return tuple(layer for layer in range(self.num_layers) if not self.window(layer))

    def window(self, layer: int) -> int:
        """Sliding window of a layer (tokens); 0: none."""
        return self.windows[layer] if self.windows else 0

    def tokens_to_keep(self, num_tokens: int, share: int) -> list[int]:
        """Per layer, the tokens of a range that a head keeps, at most: of a window those that later queries see.

        Later queries of a layer with a window see the last ``window - 1`` tokens, of which a head keeps at most
        ``share``.
        """
        windows = self.windows or (0,) * self.num_layers
        return [min(window - 1, num_tokens, share) if window else num_tokens for window in windows]

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_qo_heads // self.num_kv_heads

    @cached_property
    def num_runs(self) -> int:
        """Runs of a span, one per (layer, KV head): as many as head slots of one token slot."""
        return self.num_layers * self.num_kv_heads

    @property
    def arena_shape(self) -> tuple[int, int, int, int]:
        """Shape of K, and of V unless it is a latent: ``(num_layers, num_token_slots, num_kv_heads, head_dim)``."""
        return self.num_layers, self.num_token_slots, self.num_kv_heads, self.head_dim

    @property
    def num_head_slots(self) -> int:
        """Head slots in the whole arena."""
        return self.num_token_slots * self.num_runs

    def slots_for(self, num_entries: int, bits: int = 16) -> int:
        """Token slots that so many packed entries take, any of which may lie in any head slot."""
        return -(-num_entries // (ROWS_PER_SLOT[bits] * self.num_runs))
