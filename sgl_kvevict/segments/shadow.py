"""Rows of a draft model for compressed tokens, in the token slots of their segment.

A draft model of speculative decoding has a pool of its own behind the same slot numbers. In it a segment of n slots has
room for n rows per layer and head of the draft, which share them as they need. What the draft lacks costs accepted
drafts, never correctness.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvevict_kernels.alloc_head_slots import alloc_head_slots
from kvevict_kernels.compact_kv import compact_kv
from kvevict_kernels.cut_runs import cut_runs
from kvevict_kernels.key_scores import accumulated_attention
from kvevict_kernels.radix_select import largest_entries
from kvevict_kernels.span_runs import SpanRuns
from kvevict_kernels.stored_rows import as_moved
from sgl_kvevict.copies import CopiedShadow
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.ragged import runs_of
from sgl_kvevict.segments.arena_rows import ArenaRows, entries_of_tokens

NEVER_SEEN = 1e-30
"""What rows that no query has seen count as paid, for each position of their token: the latest are kept, in all heads
alike. No sum of squares is so small."""


@dataclass(frozen=True)
class Shadow:
    """The draft's rows in a segment's slots; some may belong to tokens that the segment has dropped.

    Attributes:
        geometry: of the draft.
        head_slots: [num_rows], int32, where the rows lie in the draft's arena, run after run in (layer, head) order.
        positions: [num_rows], int32, logical position of each row's token, ascending within a run.
        indptr: [num_layers * num_kv_heads + 1], int32, start of each run; layers and heads are the draft's.
        paid: [num_rows], float32, the attention that each row was paid.
    """

    geometry: KVGeometry
    head_slots: Tensor
    positions: Tensor
    indptr: Tensor
    paid: Tensor

    def runs(self, start: int, end: int) -> SpanRuns:
        """Rows that the draft reads of the tokens ``[start, end)``; no host sync."""
        shape = self.geometry.num_layers, self.geometry.num_kv_heads
        starts, lens = cut_runs(self.positions, self.indptr, start, end)
        return SpanRuns(self.head_slots, starts.view(shape), lens.view(shape), end - start, positions=self.positions)


class DraftRows(ArenaRows):
    """The draft's arenas, ``geometry.arena_shape``, and the attention that its queries paid to uncompressed tokens.

    ``paid``, [num_layers, num_token_slots, num_kv_heads], float32: squares summed over the queries of a prefill, the
    largest of all prefills since the token was computed.
    """

    def __init__(self, geometry: KVGeometry, k_arena: Tensor, v_arena: Tensor) -> None:
        super().__init__(geometry, k_arena, v_arena)
        self.paid = torch.zeros(geometry.arena_shape[:3], device=k_arena.device)

    @property
    def slot_bytes(self) -> int:
        """Bytes outside the pool of the rows of one token slot: keys, values, positions and attention."""
        return self.geometry.num_runs * (self.geometry.entry_dim * self.k_arena.element_size() + 8)

    def forget(self, token_slots: Tensor) -> None:
        """Forget what was paid to the tokens in these slots, [num_tokens], int: new ones are computed there."""
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
        if self.geometry.window(layer):
            return
        scale = sm_scale * self.geometry.scales.of(layer)[0]
        positions = {"key_start": start, "query_start": query_start}
        keys = self.k_arena[layer]
        squares = accumulated_attention(
            queries, lse, keys, token_slots, sm_scale=scale, reduction="squares", **positions
        )
        # The largest of all prefills: a token that one prompt needs is not worth less because others do not.
        self.paid[layer, token_slots] = torch.maximum(self.paid[layer, token_slots], squares.T)

    def absent(self) -> Shadow:
        """The shadow of entries that came from outside the pool: no row."""
        device = self.paid.device
        none = torch.empty(0, dtype=torch.int32, device=device)
        indptr = torch.zeros(self.geometry.num_runs + 1, dtype=torch.int32, device=device)
        return Shadow(self.geometry, none, none, indptr, none.float())

    def every(self, token_slots: Tensor, start: int) -> Shadow:
        """All rows of uncompressed tokens, in their ordinary slots.

        ``token_slots``, [num_tokens], int64, are those of consecutive tokens from position ``start`` on.
        """
        head_slots, positions, indptr = entries_of_tokens(self.geometry, token_slots, start)
        # No prefill has looked at an answer. All its rows would be equal, and the first heads would take all the room.
        paid = self.paid[:, token_slots].transpose(1, 2).flatten().maximum(positions * NEVER_SEEN)
        return Shadow(self.geometry, head_slots, positions, indptr, paid)

    def move(self, shadow: Shadow, end: int, slots: Tensor) -> Shadow:
        """Move the rows that were paid most, of all layers and heads together, into ``slots``, [num_slots], int64.

        Tokens from ``end`` on go first.
        """
        chosen, moved = self.chosen(shadow, end, slots)
        self.write(shadow, chosen, moved)
        return moved

    def chosen(self, shadow: Shadow, end: int, slots: Tensor) -> tuple[Tensor, Shadow]:
        """The rows that :meth:`move` moves, [num_kept], int64, and where they will lie; writes nothing."""
        # Below every sum of squares: rows of tokens that are gone are kept only where room is left.
        keys = torch.where(shadow.positions < end, shadow.paid, -1.0)
        return self._lay_out(keys, shadow.indptr, shadow.positions, shadow.paid, slots)

    def write(self, shadow: Shadow, chosen: Tensor, moved: Shadow) -> None:
        """Move rows to where :meth:`chosen` has placed them."""
        if chosen.numel():
            compact_kv(*self._moved, shadow.head_slots[chosen], moved.head_slots)

    def copy(
        self, parts: Sequence[tuple[Shadow, tuple[int, int] | None]], num_slots: int | None = None
    ) -> CopiedShadow:
        """Copy rows of shadows of one path, as if one shadow held them.

        Args:
            parts: the shadows, each with the bounds of the tokens whose rows are copied (a host sync reads how many
                these are); None: of all tokens.
            num_slots: copy only the rows that were paid most, as many as so many token slots hold; None: all.
        """
        shadow = self.joined(parts)
        if num_slots is not None:
            count = min(num_slots * self.geometry.num_runs, shadow.positions.numel())
            # Floats of at least 0 are ordered as the integers of their bits.
            kept, lens = largest_entries(shadow.paid.view(torch.int32), shadow.indptr, count)
            indptr = pad(lens.cumsum(0, dtype=torch.int32), (1, 0))
            head_slots, positions = shadow.head_slots[kept], shadow.positions[kept]
            shadow = Shadow(self.geometry, head_slots, positions, indptr, shadow.paid[kept])
        slots = shadow.head_slots.long()
        k, v = (as_moved(arena.flatten(0, 2))[slots].view(arena.dtype) for arena in self._moved)
        lens = shadow.indptr.diff().view(self.geometry.num_layers, self.geometry.num_kv_heads)
        return CopiedShadow(lens, shadow.positions, k, v, shadow.paid)

    def joined(self, parts: Sequence[tuple[Shadow, tuple[int, int] | None]]) -> Shadow:
        """The rows of shadows of one path as one, run after run, where they lie; see :meth:`copy`."""
        found: list[list[Tensor]] = []
        for shadow, bounds in parts:
            of_rows = runs_of(shadow.indptr.diff(), shadow.positions.numel())
            rows = [of_rows, shadow.positions, shadow.head_slots, shadow.paid]
            if bounds is not None:
                kept = ((shadow.positions >= bounds[0]) & (shadow.positions < bounds[1])).nonzero().squeeze(-1)
                rows = [each[kept] for each in rows]
            found.append(rows)
        of_rows, *others = (torch.cat(each) for each in zip(*found, strict=True))
        # Stable: within a run positions have to go on ascending.
        of_rows, order = of_rows.sort(stable=True)
        numbers = torch.arange(self.geometry.num_runs + 1, device=of_rows.device)
        positions, head_slots, paid = (each[order] for each in others)
        return Shadow(self.geometry, head_slots, positions, torch.searchsorted(of_rows, numbers, out_int32=True), paid)

    def place(self, copied: CopiedShadow, slots: Tensor) -> Shadow:
        """Write the copies that were paid most into ``slots``, [num_slots], int64."""
        paid, positions = copied.paid.to(slots.device), copied.positions.to(slots.device)
        indptr = pad(copied.lens.to(slots.device).flatten().cumsum(0), (1, 0))
        kept, placed = self._lay_out(paid, indptr, positions, paid, slots)
        into = placed.head_slots.long()
        for arena, rows in zip(self._moved, (copied.k, copied.v), strict=True):
            as_moved(arena.flatten(0, 2))[into] = as_moved(rows.contiguous()).to(arena.device)[kept]
        return placed

    def _lay_out(
        self, keys: Tensor, indptr: Tensor, positions: Tensor, paid: Tensor, slots: Tensor
    ) -> tuple[Tensor, Shadow]:
        """Give the rows of largest key (float32, none is NaN) head slots in ``slots``; return them, and their shadow.

        Rows, [num_kept], int64, ascending, are numbered run after run, as ``indptr`` says.
        """
        num_entries = min(slots.numel() * self.geometry.num_runs, keys.numel())
        if not num_entries:
            return positions[:0].long(), self.absent()
        kept, lens = largest_entries(keys.view(torch.int32), indptr, num_entries)  # ordered as the numbers are
        keep_lens = lens.view(self.geometry.num_layers, self.geometry.num_kv_heads)
        indptr, head_slots = alloc_head_slots(keep_lens, slots, self.geometry.num_token_slots, num_entries)
        return kept, Shadow(self.geometry, head_slots, positions[kept], indptr, paid[kept])
