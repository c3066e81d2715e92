"""Packer: writes segments of the KV arena, and copies and places their entries."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvevict_kernels.alloc_head_slots import alloc_head_slots
from kvevict_kernels.compact_kv import compact_kv
from kvevict_kernels.stored_rows import as_moved, as_words
from sgl_kvevict.errors import InvariantError
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.guard import accounting
from sgl_kvevict.prefix.arena_rows import ArenaRows, rows_by_head_slot
from sgl_kvevict.prefix.shadow import CopiedShadow, DraftRows, Shadow
from sgl_kvevict.prefix.sources import Part, Sources, TokenRange
from sgl_kvevict.prefix.span import CopiedEntries, Entries, Segment, View
from sgl_kvevict.ragged import MergePlan


class SegmentPacker(ArenaRows):
    """Packs entries into token slots of one arena.

    Any head slot may hold an entry of any (layer, head), so a segment of ``C`` entries takes
    ``ceil(C / (num_layers * num_kv_heads))`` token slots, however uneven its runs are. ``drafts``: rows of a draft
    model, which follow :meth:`rewrite`; segments from outside the pool have none, unless they are placed
    (:meth:`DraftRows.place`).
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

    def rewrite(
        self, sources: Sources, num_slots: int, bits: int, merge: MergePlan | None = None
    ) -> tuple[Segment, Tensor]:
        """Write the kept entries of consecutive ranges of a path as one segment, into the first of the ranges' slots.

        Everything known of an entry goes with it. The segment of a single range that was packed already keeps all that
        was known of the range; the caller knows it of others. Spans are not touched. No host sync.

        Args:
            sources: the ranges, all that is alive of each, and the entries that are kept.
            num_slots: token slots of the segment, at least as many as the entries take.
            bits: of a number of a row. Only 16 is implemented: rows are moved as they are.
            merge: the weighted sums that replace the kept entries; its sources need not be kept.

        Returns:
            The segment, and the slots that are free now, [num_freed], int64.

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
        bounds = sources.start, sources.end
        segment = self._laid_out(held[:num_slots], selection.keep_lens, kept.positions, bounds, kept.order)
        with accounting():
            if merge is None:
                compact_kv(*self._moved, rows.head_slots, segment.head_slots)
            else:
                weights = {"indptr": merge.indptr, "weights": merge.weights}
                compact_kv(*self._moved, rows.head_slots, segment.head_slots, **weights)
            if self.drafts is not None:
                segment.shadow = self.drafts.move(self._shadows(sources.parts), segment.end, segment.token_slots)
            if len(sources.parts) == 1 and isinstance(sources.parts[0], View):
                _carry_on(sources.parts[0].segment, segment, kept)
        return segment, held[num_slots:]

    def _shadows(self, parts: Sequence[Part]) -> list[Shadow]:
        """The draft's rows of each part."""
        assert self.drafts is not None
        return [
            self.drafts.every(part.token_slots, part.start)
            if isinstance(part, TokenRange)
            else part.segment.shadow or self.drafts.absent()
            for part in parts
        ]

    def _laid_out(
        self,
        token_slots: Tensor,
        keep_lens: Tensor,
        positions: Tensor,
        bounds: tuple[int, int],
        order: Tensor | None,
    ) -> Segment:
        """A segment whose rows are not written; arguments as in :class:`Segment`, ``bounds`` are its start and end."""
        num_token_slots = self.geometry.num_token_slots
        indptr, head_slots = alloc_head_slots(keep_lens, token_slots, num_token_slots, positions.numel())
        return Segment(
            self.geometry,
            token_slots=token_slots.clone(),
            head_slots=head_slots,
            positions=positions,
            indptr=indptr,
            start=bounds[0],
            end=bounds[1],
            order=order,
            shadow=self._no_shadow,
        )

    def copy(self, views: Sequence[View]) -> CopiedEntries:
        """Copy the entries of consecutive views of one path, as if one segment held them; syncs as :class:`Sources`."""
        sources = Sources(self.geometry, views)
        kept = sources.entries()
        slots = kept.head_slots.long()
        k, v = (as_words(arena.flatten(0, 2))[slots].view(arena.dtype) for arena in self._moved)
        return CopiedEntries(sources.selection.keep_lens, kept.positions, k, v, kept.order)

    def copy_shadow(self, views: Sequence[View]) -> CopiedShadow | None:
        """Copy the draft's rows of consecutive views of one path; syncs as :meth:`copy`. None: there is no draft."""
        if self.drafts is None:
            return None
        bounds = [None if view.is_whole else (view.start, view.end) for view in views]
        shadows = [view.segment.shadow or self.drafts.absent() for view in views]
        return self.drafts.copy(list(zip(shadows, bounds, strict=True)))

    @accounting()
    def place(self, segment: Segment, k: Tensor, v: Tensor) -> None:
        """Write the rows of a segment made by :meth:`new_segment`, from any device.

        ``k`` and ``v`` are [num_entries, head_dim], in the arena's dtype.
        """
        slots = segment.head_slots.long()
        for arena, rows in zip(self._moved, (k, v), strict=True):
            rows_by_head_slot(arena)[slots] = as_moved(rows.contiguous()).to(arena.device)

    @accounting()
    def new_segment(
        self,
        token_slots: Tensor,
        keep_lens: Tensor,
        positions: Tensor,
        start: int,
        end: int,
        *,
        splittable: bool = True,
        order: Tensor | None = None,
    ) -> Segment:
        """Lay out a segment in empty slots; arguments as in :class:`Segment`, ``keep_lens`` as in :class:`Selection`.

        There may be more ``token_slots`` than the entries need, because another rank needs more; InvariantError if
        there are fewer.
        """
        num_entries, device = positions.numel(), token_slots.device
        if token_slots.numel() < self.geometry.slots_for(num_entries):
            raise InvariantError(f"{num_entries} entries in {token_slots.numel()} token slots")
        order = None if order is None else order.to(device)
        segment = self._laid_out(token_slots, keep_lens.to(device), positions.to(device), (start, end), order)
        segment.splittable = splittable
        return segment


def _carry_on(old: Segment, new: Segment, kept: Entries) -> None:
    """Make ``new`` hold what is left of ``old``."""
    new.splittable, new.policy_state = old.splittable, old.policy_state
    new.is_generated, new.is_joined, new.is_measured = old.is_generated, old.is_joined, old.is_measured
    new.entry_attention = old.entry_attention
    if new.entry_attention is not None:
        assert kept.squares is not None
        new.entry_attention.squares = kept.squares
