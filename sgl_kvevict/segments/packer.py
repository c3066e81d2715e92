"""Packer: writes segments of the KV arena, and copies and places their entries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from kvevict_kernels.alloc_head_slots import alloc_head_slots
from kvevict_kernels.compact_kv import compact_kv
from kvevict_kernels.stored_rows import as_moved, as_words
from sgl_kvevict.copies import CopiedShadow
from sgl_kvevict.errors import InvariantError
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.guard import accounting
from sgl_kvevict.ragged import MergePlan
from sgl_kvevict.segments.arena_rows import ArenaRows, rows_by_head_slot
from sgl_kvevict.segments.segment import CopiedEntries, Entries, Order, Packed, Segment
from sgl_kvevict.segments.shadow import DraftRows, Shadow
from sgl_kvevict.segments.sources import Part, Sources, TokenRange


class SegmentPacker(ArenaRows):
    """Packs entries into token slots of one arena.

    Any head slot may hold an entry of any (layer, head), so a segment of ``C`` entries takes
    ``ceil(C / (num_layers * num_kv_heads))`` token slots, however uneven its runs are. ``drafts``: rows of a draft
    model, which follow :meth:`rewrite`; segments from outside the pool have none, unless they bring some.
    """

    def __init__(self, geometry: KVGeometry, k_arena: Tensor, v_arena: Tensor, drafts: DraftRows | None = None) -> None:
        super().__init__(geometry, k_arena, v_arena)
        self.drafts = drafts
        self._no_shadow = None if drafts is None else drafts.absent()

    @property
    def slot_bytes(self) -> int:
        """Bytes outside the pool of a token slot's entries: keys, values, positions, order, draft's rows."""
        row_bytes = self.geometry.entry_dim * self.k_arena.element_size()
        draft_bytes = 0 if self.drafts is None else self.drafts.slot_bytes
        return self.geometry.num_runs * (row_bytes + 4 + 2) + draft_bytes

    def rewrite(self, sources: Sources, num_slots: int, bits: int, merge: MergePlan | None = None) -> Rewritten:
        """Write the kept entries of consecutive ranges of a path into the first of the ranges' slots.

        Segments and spans are not touched. No host sync.

        Args:
            sources: the ranges, all that is alive of each, and the entries that are kept.
            num_slots: token slots that hold them afterwards, at least as many as the entries take.
            bits: of a number of a row. Only 16 is implemented: rows are moved as they are.
            merge: the weighted sums that replace the kept entries; its sources need not be kept.

        Raises:
            ValueError: ``bits`` is not 16; more slots than the ranges hold, or fewer than the entries take.
        """
        held, selection = sources.token_slots, sources.selection
        if bits != 16:
            raise ValueError(f"bits: got {bits}; allowed: 16")
        if not sources.fewest_slots <= num_slots <= held.numel():
            raise ValueError(
                f"num_slots: got {num_slots} for {selection.num_entries} entries of ranges of {held.numel()} slots; "
                f"allowed: {sources.fewest_slots} to {held.numel()}"
            )
        kept = sources.entries()
        rows = kept
        if merge is not None:
            runs = merge.layers.long() * self.geometry.num_kv_heads + merge.heads
            rows = sources.at(runs, merge.indices)
        packed = self._laid_out(held[:num_slots], selection.keep_lens, kept.positions)
        with accounting():
            if merge is None:
                compact_kv(*self._moved, rows.head_slots, packed.head_slots)
            else:
                weights = {"indptr": merge.indptr, "weights": merge.weights}
                compact_kv(*self._moved, rows.head_slots, packed.head_slots, **weights)
            if self.drafts is not None:
                shadow = self.drafts.move(self._shadows(sources.parts), sources.end, packed.token_slots)
                packed = replace(packed, shadow=shadow)
        return Rewritten(packed, kept, held[num_slots:])

    def _shadows(self, parts: Sequence[Part]) -> list[Shadow]:
        """The draft's rows of each part."""
        assert self.drafts is not None
        return [
            self.drafts.every(part.token_slots, part.start)
            if isinstance(part, TokenRange)
            else part.segment.storage.shadow or self.drafts.absent()
            for part in parts
        ]

    def _laid_out(self, token_slots: Tensor, keep_lens: Tensor, positions: Tensor) -> Packed:
        """Storage whose rows are not written; arguments as in :class:`Packed`, ``keep_lens`` as in Selection."""
        num_token_slots = self.geometry.num_token_slots
        indptr, head_slots = alloc_head_slots(keep_lens, token_slots, num_token_slots, positions.numel())
        return Packed(token_slots.clone(), head_slots, positions, indptr, self._no_shadow)

    def copy(self, sources: Sources) -> CopiedEntries:
        """Copy the kept entries of consecutive ranges of one path, as if one segment held them."""
        kept = sources.entries()
        slots = kept.head_slots.long()
        k, v = (as_words(arena.flatten(0, 2))[slots].view(arena.dtype) for arena in self._moved)
        return CopiedEntries(sources.selection.keep_lens, kept.positions, k, v, kept.keys)

    def copy_shadow(self, sources: Sources) -> CopiedShadow | None:
        """Copy the draft's rows of consecutive ranges of one path; None: there is no draft.

        Of packed ones all rows; of uncompressed ones those that were paid most, as many as the kept entries' slots
        hold. A host sync reads how many rows a part of a segment has.
        """
        if self.drafts is None:
            return None
        bounds = [
            None if isinstance(part, TokenRange) or part.is_whole else (part.start, part.end) for part in sources.parts
        ]
        is_whole = any(isinstance(part, TokenRange) for part in sources.parts)
        most = sources.fewest_slots if is_whole else None
        return self.drafts.copy(list(zip(self._shadows(sources.parts), bounds, strict=True)), most)

    @accounting()
    def place(self, packed: Packed, k: Tensor, v: Tensor) -> None:
        """Write the rows of a segment made by :meth:`new_segment`, from any device.

        ``k`` and ``v`` are [num_entries, head_dim], in the arena's dtype.
        """
        slots = packed.head_slots.long()
        for arena, rows in zip(self._moved, (k, v), strict=True):
            rows_by_head_slot(arena)[slots] = as_moved(rows.contiguous()).to(arena.device)

    @accounting()
    def new_segment(
        self,
        token_slots: Tensor,
        copied: CopiedEntries,
        start: int,
        end: int,
        *,
        is_measured: bool = False,
        shadow: CopiedShadow | None = None,
    ) -> Segment:
        """Write a packed segment of the tokens ``[start, end)`` into empty slots, from any device.

        There may be more ``token_slots`` than the entries need, because another rank needs more; InvariantError if
        there are fewer.
        """
        num_entries, device = copied.positions.numel(), token_slots.device
        if token_slots.numel() < self.geometry.slots_for(num_entries):
            raise InvariantError(f"{num_entries} entries in {token_slots.numel()} token slots")
        packed = self._laid_out(token_slots, copied.keep_lens.to(device), copied.positions.to(device))
        self.place(packed, copied.k, copied.v)
        if self.drafts is not None and shadow is not None:
            packed = replace(packed, shadow=self.drafts.place(shadow, packed.token_slots))
        order = None
        if copied.order is not None:
            keys = copied.order.to(device)
            order = Order(lambda: keys, is_measured, start, end)
        return Segment(self.geometry, start, end, packed, order)


@dataclass(frozen=True, eq=False)
class Rewritten:
    """Result of a rewrite.

    Attributes:
        packed: where the kept entries lie now.
        kept: what is known of them; ``kept.head_slots`` are where they lay before.
        freed: [num_freed], int64, token slots that are free now.
    """

    packed: Packed
    kept: Entries
    freed: Tensor
