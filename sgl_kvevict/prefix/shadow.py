"""Rows of a draft model for compressed tokens: in the token slots of their segment, one token a slot.

A draft model of speculative decoding has a pool of its own behind the same slot numbers. A segment of n slots has room
there for the rows of exactly n tokens, in every layer and head of the draft. What the draft lacks costs accepted
drafts, never correctness.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvevict_kernels.cut_runs import cut_runs
from kvevict_kernels.head_slots import head_slot_of
from kvevict_kernels.span_runs import SpanRuns
from sgl_kvevict.geometry import KVGeometry

NO_TOKEN = torch.iinfo(torch.int32).max
"""Position of a slot whose token was dropped."""


@dataclass(frozen=True)
class Shadow:
    """The tokens of a segment whose draft rows lie in its slots, one a slot, from its first slot on.

    ``positions`` are [num_tokens], int32, logical, ascending, :data:`NO_TOKEN` at the end; ``head_slots``
    [num_runs * num_tokens], int32, in the draft's arena, run after run.
    """

    geometry: KVGeometry  # of the draft
    positions: Tensor
    head_slots: Tensor

    def runs(self, start: int, end: int) -> SpanRuns:
        """What the draft reads of ``[start, end)``: the same tokens in every layer and head; no host sync."""
        shape = self.geometry.num_layers, self.geometry.num_kv_heads
        runs = torch.arange(self.geometry.num_runs + 1, dtype=torch.int32, device=self.positions.device)
        firsts = runs * self.positions.numel()
        begin, length = cut_runs(self.positions, firsts[:2], start, end)
        starts, lens = (firsts[:-1] + begin).view(shape), length.expand(shape).contiguous()
        positions = self.positions.repeat(self.geometry.num_runs) if self.geometry.has_windows else None
        return SpanRuns(self.head_slots, starts, lens, end - start, positions=positions)


class DraftRows:
    """The draft's arenas, ``geometry.arena_shape``; keeps a segment's shadow when its entries are written or moved."""

    def __init__(self, geometry: KVGeometry, k_arena: Tensor, v_arena: Tensor) -> None:
        self._geometry = geometry
        self._arenas = k_arena.view(torch.uint8), v_arena.view(torch.uint8)

    def absent(self) -> Shadow:
        """The shadow of entries that came from outside the pool: no token."""
        none = torch.empty(0, dtype=torch.int32, device=self._arenas[0].device)
        return Shadow(self._geometry, none, none)

    def move(self, kept: Tensor, start: int, end: int, tokens: Tensor, sources: Tensor, slots: Tensor) -> Shadow:
        """Move the rows of those tokens that most heads of the target keep into a segment's slots.

        Args:
            kept: [num_entries], int32, positions of the segment's entries.
            start: first token of the segment.
            end: token after its last one.
            tokens: [n], int32, positions of the tokens to choose from, ascending; those from ``end`` on are dropped.
            sources: [at least n], int64, slots where the draft's rows of these tokens lie.
            slots: [num_slots], int64, the segment's.

        Returns:
            The shadow, of ``min(n, num_slots)`` tokens. SGLang's drafts see the next token at each position, so a row
            is worth what the heads keep of the token after it.
        """
        last = end - start - 1
        votes = torch.zeros(last + 1, dtype=torch.int32, device=kept.device)
        votes.scatter_add_(0, (kept - start).long(), torch.ones_like(kept))
        is_live = tokens < end
        ranks = torch.where(is_live, votes[(tokens - start).clamp(max=last - 1).long() + 1], -1)
        chosen = ranks.argsort(descending=True, stable=True)[: slots.numel()].sort().values
        slots = slots[: chosen.numel()]
        for arena in self._arenas:
            arena[:, slots] = arena[:, sources[chosen]]
        positions = torch.where(is_live, tokens, NO_TOKEN)[chosen]
        return Shadow(self._geometry, positions, self._head_slots(slots))

    def _head_slots(self, slots: Tensor) -> Tensor:
        layers, heads = self._geometry.num_layers, self._geometry.num_kv_heads
        layer = torch.arange(layers, dtype=torch.int32, device=slots.device).view(-1, 1, 1)
        head = torch.arange(heads, dtype=torch.int32, device=slots.device).view(1, -1, 1)
        numbered: Tensor = head_slot_of(layer, slots.int(), head, self._geometry.num_token_slots, heads)
        return numbered.flatten()
