"""Features of learned scores, per KV head and from that head alone, so that tensor-parallel ranks exchange nothing.

Columns: key before RoPE (head_dim); value (head_dim; none for latents, whose keys contain it); log norms of key and
value (2); position, as a share of the range's end (1); constant (1); optionally the log of the last queries' mean
attention, pooled and not (2).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvevict_kernels.checks import is_latent
from kvevict_kernels.key_scores import window_scores
from kvevict_kernels.rotary import Rotary
from kvevict_kernels.stored_rows import gather_rows
from sgl_kvevict.geometry import UNSCALED, KVScales
from sgl_kvevict.policies.layer_view import LayerView
from sgl_kvevict.policies.signals import QueryWindow, Signal

NUM_SCALARS = 4
"""Columns of a cached token besides key and value."""
NUM_WINDOW = 2
"""Columns of window attention."""
KERNEL_SIZE = 7
"""Width of window attention's max pool along the tokens."""
ATTENTION_FLOOR = 1e-4
"""Added to attention before its logarithm."""
NORM_FLOOR = 1e-6
"""Least norm whose logarithm is taken."""


def num_cache_features(head_dim: int, is_latent: bool = False) -> int:
    """Number of features of the cache alone."""
    return (1 if is_latent else 2) * head_dim + NUM_SCALARS


@dataclass(frozen=True)
class CachedRange:
    """Uncompressed tokens of the arenas ([num_layers, num_token_slots, num_kv_heads, head_dim], keys after RoPE).

    Attributes:
        token_slots: [num_tokens], int64; ``start`` is the logical position of the first token.
        end: logical end of the whole range, also for a sample; the position feature is relative to it.
        stride: logical positions from one token to the next.
        slot_positions: [axes, num_token_slots], int32: where RoPE has turned the key of each slot; None: to its logical
            position.
    """

    k_arena: Tensor
    v_arena: Tensor
    token_slots: Tensor
    start: int
    end: int
    scales: KVScales = UNSCALED
    stride: int = 1
    slot_positions: Tensor | None = None

    @property
    def num_layers(self) -> int:
        """Layers of the arena."""
        return self.k_arena.shape[0]

    @property
    def is_latent(self) -> bool:
        """Whether values are a part of the keys' rows."""
        return is_latent(self.k_arena, self.v_arena)

    @property
    def positions(self) -> Tensor:
        """[num_tokens], int64, logical."""
        last = self.start + self.token_slots.numel() * self.stride
        return torch.arange(self.start, last, self.stride, device=self.token_slots.device)

    @property
    def rotary_positions(self) -> Tensor:
        """[num_tokens] or [axes, num_tokens], int64, of :meth:`Rotary.rows`."""
        return self.positions if self.slot_positions is None else self.slot_positions[:, self.token_slots].long()

    def cut(self, part: slice) -> CachedRange:
        """A part of the tokens; ``end`` stays that of the whole range."""
        return replace(self, token_slots=self.token_slots[part], start=self.start + part.start * self.stride)

    def sample(self, first: int, most: int) -> CachedRange:
        """At most ``most`` evenly spaced tokens from the logical position ``first`` on."""
        skip = min(max(first - self.start, 0), self.token_slots.numel())
        stride = max(-(-(self.token_slots.numel() - skip) // most), 1)
        slots = self.token_slots[skip::stride]
        return replace(self, token_slots=slots, start=self.start + skip, stride=stride)


def cache_features(tokens: CachedRange, layer: int, rotary: Rotary) -> Tensor:
    """[num_kv_heads, num_tokens, num_cache_features], float32: features of one layer."""
    positions = tokens.positions
    k_scale, v_scale = tokens.scales.of(layer)
    stored = gather_rows(tokens.k_arena[layer], tokens.token_slots, k_scale)
    # Turned back, because a linear map cannot undo a rotation that differs with each position.
    keys = rotary.apply(stored, tokens.rotary_positions, inverse=True)
    values = gather_rows(tokens.v_arena[layer], tokens.token_slots, v_scale).float()
    # A rotation keeps the norm, so the stored key has the right one.
    norms = [log_norm(torch.linalg.vector_norm(rows.float(), dim=-1)) for rows in (stored, values)]
    place = (positions / tokens.end).float()[:, None].expand(-1, keys.shape[1])
    scalars = torch.stack([*norms, place, torch.ones_like(place)], dim=-1)
    columns = [keys, scalars] if tokens.is_latent else [keys, values, scalars]
    return torch.cat(columns, dim=-1).transpose(0, 1)


def log_norm(norms: Tensor) -> Tensor:
    """Logarithms of norms; those of 0 are finite, too."""
    return norms.clamp_min(NORM_FLOOR).log_()


def window_features(view: LayerView) -> Tensor | None:
    """[num_kv_heads, num_tokens, NUM_WINDOW], float32: features of one layer; None without window queries."""
    window = view.find(Signal.WINDOW_QUERIES, QueryWindow)
    if window is None:
        return None
    both = window_scores(**view.attention_of(window), kernel_size=KERNEL_SIZE, order="mean-pool")
    return torch.stack(both, dim=-1).add_(ATTENTION_FLOOR).log_()
