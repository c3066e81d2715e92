"""Rows of a draft model for compressed tokens, in the token slots of their segment.

A draft model of speculative decoding has a pool of its own behind the same slot numbers. In it a segment of n slots has
room for n rows per layer and head of the draft, which share them as they need. What the draft lacks costs accepted
drafts, never correctness.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvevict_kernels import radix_select
from kvevict_kernels.alloc_head_slots import alloc_head_slots
from kvevict_kernels.compact_kv import compact_kv
from kvevict_kernels.cut_runs import cut_runs
from kvevict_kernels.head_slots import head_slot_of
from kvevict_kernels.key_scores import accumulated_attention
from kvevict_kernels.span_runs import SpanRuns
from sgl_kvevict.geometry import KVGeometry


@dataclass(frozen=True)
class Shadow:
    """The draft's rows in a segment's slots; some may belong to tokens that the segment has dropped.

    ``head_slots``, ``positions`` and ``indptr`` are as in :class:`Segment`, in the draft's arena; ``paid``,
    [num_entries], float32, is the attention that each row was paid.
    """

    geometry: KVGeometry  # of the draft
    head_slots: Tensor
    positions: Tensor
    indptr: Tensor
    paid: Tensor

    def runs(self, start: int, end: int) -> SpanRuns:
        """Rows that the draft reads of the tokens ``[start, end)``; no host sync."""
        shape = self.geometry.num_layers, self.geometry.num_kv_heads
        starts, lens = cut_runs(self.positions, self.indptr, start, end)
        return SpanRuns(self.head_slots, starts.view(shape), lens.view(shape), end - start, positions=self.positions)


class DraftRows:
    """The draft's arenas, ``geometry.arena_shape``, and the attention that its queries paid to uncompressed tokens.

    ``paid``, [num_layers, num_token_slots, num_kv_heads], float32: squares summed over the queries of a prefill, the
    largest of all prefills since the token was computed.
    """

    def __init__(self, geometry: KVGeometry, k_arena: Tensor, v_arena: Tensor) -> None:
        self.paid = torch.zeros(geometry.arena_shape[:3], device=k_arena.device)
        self._geometry = geometry
        self._arenas = k_arena, v_arena

    def forget(self, token_slots: Tensor) -> None:
        """New tokens are computed in these slots, [num_tokens], int."""
        self.paid[:, token_slots.long()] = 0.0

    def see(
        self,
        layer: int,
        queries: Tensor,
        lse: Tensor,
        token_slots: Tensor,
        start: int,
        query_start: int,
        sm_scale: float,
    ) -> None:
        """Record what the queries of a prefill paid to uncompressed tokens; layers with a window are left out.

        Args:
            layer: of the draft.
            queries: [n, num_qo_heads, head_dim], contiguous, at consecutive positions from ``query_start`` on.
            lse: [n, num_qo_heads], float32, contiguous.
            token_slots: [num_tokens], int64, of consecutive tokens from position ``start`` on.
            start: position of the first token.
            query_start: position of the first query.
            sm_scale: softmax scale.
        """
        if self._geometry.window(layer):
            return
        scale = sm_scale * self._geometry.scales.of(layer)[0]
        positions = {"key_start": start, "query_start": query_start}
        keys = self._arenas[0][layer]
        squares = accumulated_attention(
            queries, lse, keys, token_slots, sm_scale=scale, reduction="squares", **positions
        )
        self.paid[layer, token_slots] = torch.maximum(self.paid[layer, token_slots], squares.T)

    def absent(self) -> Shadow:
        """The shadow of entries that came from outside the pool: no row."""
        device = self.paid.device
        none = torch.empty(0, dtype=torch.int32, device=device)
        indptr = torch.zeros(self._geometry.num_runs + 1, dtype=torch.int32, device=device)
        return Shadow(self._geometry, none, none, indptr, none.float())

    def pack(self, token_slots: Tensor, start: int, slots: Tensor) -> Shadow:
        """Move the rows that were paid most, of all layers and heads together, into a segment's slots.

        ``token_slots``, [num_tokens], int64, are those of uncompressed tokens from position ``start`` on; ``slots``
        [num_slots], int64.
        """
        geometry, device, num_tokens = self._geometry, token_slots.device, token_slots.numel()
        runs = torch.arange(geometry.num_runs + 1, dtype=torch.int32, device=device)
        layers, heads = runs[:-1, None] // geometry.num_kv_heads, runs[:-1, None] % geometry.num_kv_heads
        sizes = geometry.num_token_slots, geometry.num_kv_heads
        head_slots: Tensor = head_slot_of(layers, token_slots.int(), heads, *sizes)
        positions = torch.arange(start, start + num_tokens, dtype=torch.int32, device=device)
        paid = self.paid[:, token_slots].transpose(1, 2).flatten()
        every = Shadow(geometry, head_slots.flatten(), positions.repeat(geometry.num_runs), runs * num_tokens, paid)
        return self.move(every, start + num_tokens, slots)

    def move(self, shadow: Shadow, end: int, slots: Tensor) -> Shadow:
        """Move the rows that were paid most into ``slots``, [num_slots], int64; tokens from ``end`` on go first."""
        num_entries = min(slots.numel() * self._geometry.num_runs, shadow.positions.numel())
        if not num_entries:
            return shadow
        keys = torch.where(shadow.positions < end, shadow.paid, -1.0).view(torch.int32)  # ordered: none is NaN
        mask = radix_select.top_mask(keys[None], num_entries)[0]
        kept = torch.nonzero_static(mask, size=num_entries).squeeze(-1)
        before = torch.nn.functional.pad(mask.cumsum(0), (1, 0))
        keep_lens = before[shadow.indptr.long()].diff().int()
        shape = self._geometry.num_layers, self._geometry.num_kv_heads
        indptr, head_slots = alloc_head_slots(keep_lens.view(shape), slots, self._geometry.num_token_slots, num_entries)
        compact_kv(*self._arenas, shadow.head_slots[kept], head_slots)
        return Shadow(self._geometry, head_slots, shadow.positions[kept], indptr, shadow.paid[kept])
