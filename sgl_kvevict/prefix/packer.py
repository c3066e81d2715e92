"""Packer: packs, places, repacks and squeezes segments of the KV arena, and copies their entries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from kvevict_kernels.alloc_head_slots import alloc_head_slots
from kvevict_kernels.compact_kv import compact_kv
from kvevict_kernels.head_slots import head_slot_of
from kvevict_kernels.stored_rows import as_moved, as_words
from kvevict_kernels.transfer import to_device
from sgl_kvevict.errors import InvariantError
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.guard import accounting
from sgl_kvevict.prefix.arena_rows import ArenaRows, rows_by_head_slot
from sgl_kvevict.prefix.shadow import CopiedShadow, DraftRows
from sgl_kvevict.prefix.span import CopiedEntries, Segment, Span, View
from sgl_kvevict.ragged import MergePlan, Selection, run_entries


class LargestOfRanks(Protocol):
    """All-reduce over tensor-parallel ranks."""

    def __call__(self, value: int, *same: int) -> int:
        """The largest ``value`` of all ranks; ``same`` must be equal on all ranks."""


def only_rank(value: int, *same: int) -> int:
    """:class:`LargestOfRanks` without other ranks."""
    return value


class SegmentPacker(ArenaRows):
    """Packs entries into token slots of one arena.

    Any head slot may hold an entry of any (layer, head), so a segment of ``C`` entries takes
    ``ceil(C / (num_layers * num_kv_heads))`` token slots, however uneven its runs are. ``drafts``: rows of a draft
    model, which follow :meth:`pack`, :meth:`squeeze` and :meth:`repack`; other segments have none, unless they are
    placed (:meth:`DraftRows.place`).
    """

    def __init__(self, geometry: KVGeometry, k_arena: Tensor, v_arena: Tensor, drafts: DraftRows | None = None) -> None:
        super().__init__(geometry, k_arena, v_arena)
        self.drafts = drafts
        self._no_shadow = None if drafts is None else drafts.absent()

    @property
    def slot_bytes(self) -> int:
        """Bytes outside the pool of a token slot's entries: keys, values, positions, worth, draft's rows."""
        row_bytes = self.geometry.entry_dim * self.k_arena.element_size()
        draft_bytes = 0 if self.drafts is None else self.drafts.slot_bytes
        return self.geometry.num_runs * (row_bytes + 4 + 2) + draft_bytes

    def pack(
        self,
        token_slots: Tensor,
        start: int,
        selection: Selection,
        *,
        merge: MergePlan | None = None,
        splittable: bool = True,
        worth: Tensor | None = None,
    ) -> tuple[Segment, Tensor]:
        """Move the selected entries of an uncompressed range into the first of the range's slots.

        ``token_slots`` are [num_tokens], int64, in token order; with ``merge``, weighted sums are stored. Returns the
        segment, and the freed slots, [num_tokens - num_slots], int64.
        """
        geometry = self.geometry
        if merge is None:
            runs = torch.repeat_interleave(
                torch.arange(geometry.num_runs, dtype=torch.int32, device=token_slots.device),
                selection.keep_lens.flatten().long(),
                output_size=selection.num_entries,
            )
            layers, heads, indices = runs // geometry.num_kv_heads, runs % geometry.num_kv_heads, selection.indices
        else:
            layers, heads, indices = merge.layers.int(), merge.heads.int(), merge.indices
        slots = token_slots.int()[indices]  # all numbers fit int32
        sources = head_slot_of(layers, slots, heads, geometry.num_token_slots, geometry.num_kv_heads)
        segment, freed = self.write(
            token_slots,
            sources,
            selection.keep_lens,
            selection.indices + start,
            (start, start + token_slots.numel()),
            None if merge is None else (merge.indptr, merge.weights),
            splittable=splittable,
            worth=worth,
        )
        if self.drafts is not None:
            segment.shadow = self.drafts.pack(token_slots, start, segment.token_slots)
        return segment, freed

    def write(
        self,
        token_slots: Tensor,
        sources: Tensor,
        keep_lens: Tensor,
        positions: Tensor,
        bounds: tuple[int, int],
        merge: tuple[Tensor, Tensor] | None = None,
        *,
        num_slots: int | None = None,
        splittable: bool = True,
        worth: Tensor | None = None,
    ) -> tuple[Segment, Tensor]:
        """Move entries, compressed or not, into the first of their slots; return as :meth:`pack`.

        The entries now lie in ``token_slots``, [num_slots], int64, at the head slots ``sources``, [num_entries], int32,
        run after run; with ``merge`` (``indptr`` and ``weights`` of :class:`MergePlan`) [num_sources]. ``keep_lens``,
        [num_layers, num_kv_heads], int32, are entries per run; ``bounds`` start and end of the segment.
        ``num_slots`` None: as few as hold the entries.
        """
        num_slots = self.geometry.slots_for(positions.numel()) if num_slots is None else num_slots
        held, freed = token_slots[:num_slots], token_slots[num_slots:]
        segment = self._laid_out(held, keep_lens, positions, bounds, splittable, worth)
        with accounting():
            if merge is None:
                compact_kv(*self._moved, sources, segment.head_slots)
            else:
                compact_kv(*self._moved, sources, segment.head_slots, indptr=merge[0], weights=merge[1])
        return segment, freed

    def _laid_out(
        self,
        token_slots: Tensor,
        keep_lens: Tensor,
        positions: Tensor,
        bounds: tuple[int, int],
        splittable: bool,
        worth: Tensor | None,
    ) -> Segment:
        """A segment whose rows are not written; arguments as for :meth:`write`, all slots are held."""
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
            splittable=splittable,
            worth=worth,
            shadow=self._no_shadow,
        )

    def copy(self, views: Sequence[View]) -> CopiedEntries:
        """Copy the entries of consecutive views of one path, as if one segment held them.

        A whole segment is copied without a host sync; otherwise one sync reads the numbers of entries.
        """
        segment = views[-1].segment
        if len(views) == 1 and views[0].is_whole:
            _, keep_lens = segment.cut(segment.start, segment.end)
            return self._copied(keep_lens, segment.positions, segment.head_slots, segment.worth)
        return self._copied(*self._in_one(views))

    def copy_shadow(self, views: Sequence[View]) -> CopiedShadow | None:
        """Copy the draft's rows of consecutive views of one path; syncs as :meth:`copy`. None: there is no draft."""
        if self.drafts is None:
            return None
        bounds = [None if view.is_whole else (view.start, view.end) for view in views]
        shadows = [view.segment.shadow or self.drafts.absent() for view in views]
        return self.drafts.copy(list(zip(shadows, bounds, strict=True)))

    def join(self, segments: Sequence[Segment]) -> tuple[Segment, Tensor]:
        """Write consecutive whole segments of one path as one, in their own slots; return as :meth:`pack`.

        All slots stay: after a repack, tensor-parallel ranks do not fill them alike. One host sync reads the numbers of
        entries.
        """
        slots = torch.cat([segment.token_slots for segment in segments])
        views = [View(segment, segment.start, segment.end) for segment in segments]
        keep_lens, positions, head_slots, worth = self._in_one(views)
        bounds = segments[0].start, segments[-1].end
        joined, freed = self.write(
            slots, head_slots, keep_lens, positions, bounds, num_slots=slots.numel(), worth=worth
        )
        joined.is_joined = True
        return joined, freed

    def _in_one(self, views: Sequence[View]) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Entries of consecutive views, run after run: ``keep_lens``, positions, head slots and worth."""
        cuts = [view.segment.cut(view.start, view.end) for view in views]
        counts = torch.stack([lens.sum() for _, lens in cuts]).tolist()
        runs, positions, head_slots, worths = [], [], [], []
        for view, (starts, lens), count in zip(views, cuts, counts, strict=True):
            kept = run_entries(starts, lens, count)
            runs.append(torch.repeat_interleave(lens.flatten().long(), output_size=count))
            positions.append(view.segment.positions[kept])
            head_slots.append(view.segment.head_slots[kept])
            worths.append(None if view.segment.worth is None else view.segment.worth[kept])
        keep_lens = torch.stack([lens for _, lens in cuts]).sum(0, dtype=torch.int32)
        order = torch.cat(runs).argsort(stable=True)
        known = [worth for worth in worths if worth is not None]
        worth = torch.cat(known)[order] if len(known) == len(views) else None
        return keep_lens, torch.cat(positions)[order], torch.cat(head_slots)[order], worth

    def _copied(self, keep_lens: Tensor, positions: Tensor, head_slots: Tensor, worth: Tensor | None) -> CopiedEntries:
        slots = head_slots.long()
        k, v = (as_words(arena.flatten(0, 2))[slots].view(arena.dtype) for arena in self._moved)
        return CopiedEntries(keep_lens, positions, k, v, worth)

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
        worth: Tensor | None = None,
    ) -> Segment:
        """Lay out a segment in empty slots; arguments as in :class:`Segment` and :meth:`write`.

        There may be more ``token_slots`` than the entries need, because another rank needs more; InvariantError if
        there are fewer.
        """
        num_entries, device = positions.numel(), token_slots.device
        if token_slots.numel() < self.geometry.slots_for(num_entries):
            raise InvariantError(f"{num_entries} entries in {token_slots.numel()} token slots")
        worth = None if worth is None else worth.to(device)
        return self._laid_out(token_slots, keep_lens.to(device), positions.to(device), (start, end), splittable, worth)

    @accounting()
    def repack(self, spans: Sequence[Span], largest: LargestOfRanks = only_rank) -> Tensor:
        """Move the entries of live spans into fewer slots and free the rest.

        ``spans`` are all live spans of one segment (else InvariantError), in path order, the owner first.
        Tensor-parallel ranks keep different entries and may need different numbers of slots. They repack the same spans
        at the same time, and all take the largest number (``largest``). Returns token slots to release, [num_freed],
        int64, which may be empty.
        """
        old = _segment_of(spans)
        starts, keep_lens = old.cut(old.start, spans[-1].end)
        num_entries = int(keep_lens.sum())  # sync: only when a node below another view of its segment is dropped
        num_slots = largest(self.geometry.slots_for(num_entries), spans[0].start, spans[-1].end, old.num_slots)
        old.num_live_entries = num_entries
        if num_slots == old.num_slots:
            return old.token_slots[:0]
        return self._move(spans, run_entries(starts, keep_lens, num_entries), keep_lens, num_slots)

    @accounting()
    def squeeze(self, spans: Sequence[Span], num_slots: int) -> Tensor:
        """Evict the entries of least worth, until ``num_slots`` token slots remain, without a host sync.

        ``spans`` as for :meth:`repack`. InvariantError if the segment has no worth, or not more than ``num_slots``
        slots. Returns token slots to release, [num_freed], int64.
        """
        old = _segment_of(spans)
        if old.worth is None or not 0 < num_slots < old.num_slots:
            raise InvariantError(f"a segment of {old.num_slots} slots cannot be squeezed into {num_slots}")
        keys = old.worth.int()
        if self.geometry.has_windows:
            keys = _in_windows(keys, old, num_slots)
        if old.num_live_entries < old.num_entries:  # a lower view was dropped without a repack
            keys = torch.where(old.positions < spans[-1].end, keys, torch.iinfo(keys.dtype).min)
        num_entries = min(num_slots * self.geometry.num_runs, old.num_live_entries)
        return self._move(spans, *self._largest(keys, old.indptr, num_entries), num_slots)

    def _move(self, spans: Sequence[Span], kept: Tensor, keep_lens: Tensor, num_slots: int) -> Tensor:
        """Move the entries ``kept`` ([n], int64, ascending) into the first slots as a new segment; return the rest."""
        old = spans[0].segment
        sources, bounds = old.head_slots[kept], (spans[0].start, spans[-1].end)
        new, freed = self.write(
            old.token_slots,
            sources,
            keep_lens,
            old.positions[kept],
            bounds,
            num_slots=num_slots,
            splittable=old.splittable,
            worth=None if old.worth is None else old.worth[kept],
        )
        if self.drafts is not None and old.shadow is not None:
            new.shadow = self.drafts.move(old.shadow, new.end, new.token_slots)
        new.policy_state, new.is_generated, new.is_joined = old.policy_state, old.is_generated, old.is_joined
        new.is_measured, new.entry_attention = old.is_measured, old.entry_attention
        if new.entry_attention is not None:
            new.entry_attention.squares = new.entry_attention.squares[kept]
        for span in spans:
            span.move_to(new)
        return freed


def _segment_of(spans: Sequence[Span]) -> Segment:
    """The segment of the spans; InvariantError unless they are all its live spans."""
    segment = spans[0].segment
    if any(span.segment is not segment for span in spans) or len(spans) != segment.num_spans:
        raise InvariantError(f"expected all {segment.num_spans} spans of one segment, got {len(spans)}")
    return segment


def _in_windows(keys: Tensor, segment: Segment, share: int) -> Tensor:
    """Change the keys ([num_entries], int32) of layers with a sliding window, so that they keep the last tokens.

    Entries of the window's last tokens, at most ``share`` per head, get the largest key, the layer's others the
    smallest. The segment cannot be split, so all readers come after it.
    """
    geometry = segment.geometry
    reach = to_device(torch.tensor(geometry.windows).sub_(1).clamp_(max=share), keys.device)
    reach = reach[segment.run_of_entries() // geometry.num_kv_heads]  # -1: no window
    bounds = torch.iinfo(keys.dtype)
    kept = torch.where(segment.positions >= segment.end - reach, bounds.max, bounds.min).to(keys.dtype)
    return torch.where(reach < 0, keys, kept)
