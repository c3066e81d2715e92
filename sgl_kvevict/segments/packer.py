"""Packer: writes segments of the KV arena, and copies and places their entries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvevict_kernels.alloc_head_slots import alloc_head_slots
from kvevict_kernels.compact_kv import compact_kv
from kvevict_kernels.recode_rows import encoded_rows, recode_rows, temporary_bytes, write_encoded
from kvevict_kernels.row_codec import STEP_BYTES, RowCoding
from kvevict_kernels.stored_rows import as_moved, as_words
from sgl_kvevict.copies import CopiedRows, CopiedShadow
from sgl_kvevict.errors import InvariantError
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.guard import accounting
from sgl_kvevict.ragged import MergePlan
from sgl_kvevict.segments.arena_rows import ArenaRows, rows_by_head_slot
from sgl_kvevict.segments.segment import CopiedEntries, Entries, Packed, Rows, Segment
from sgl_kvevict.segments.shadow import DraftRows, Shadow
from sgl_kvevict.segments.sources import Range, Sources, TokenRange

ENTRY_BYTES = 10
"""Of an entry on the pool's device beside the pool: its row number (4), its position (4) and its key (2)."""


class SegmentPacker(ArenaRows):
    """Packs entries into token slots of one arena.

    Any head slot may hold an entry of any (layer, head), or several with fewer bits, so a segment whose entries fill
    ``C`` head slots takes ``ceil(C / (num_layers * num_kv_heads))`` token slots, however uneven its runs are.

    Args:
        geometry: of the arena.
        k_arena: as in :class:`ArenaRows`, like ``v_arena``.
        drafts: rows of a draft model, which :meth:`rewrite` moves, too; None: there is no draft model. Segments from
            outside the pool have none, unless they bring some.
        coding: with what rows of 4 bits are written; None: all rows have 16.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        k_arena: Tensor,
        v_arena: Tensor,
        drafts: DraftRows | None = None,
        coding: RowCoding | None = None,
    ) -> None:
        super().__init__(geometry, k_arena, v_arena)
        self.drafts = drafts
        self.coding = coding
        self._no_shadow = None if drafts is None else drafts.absent()

    @property
    def slot_bytes(self) -> int:
        """Bytes outside the pool of a token slot's entries of 16 bits: keys, values, positions, order, draft's rows."""
        return self._slot_bytes(1)

    def beside_bytes(self, num_entries: int) -> int:
        """Bytes on the device beside the pool: of so many entries, and the steps of all rows that it may hold."""
        steps = 0 if self.coding is None else self.coding.num_bytes
        return num_entries * ENTRY_BYTES + steps

    def bytes_of(self, segment: Segment) -> int:
        """Bytes that a segment's entries take at most outside the pool.

        They follow from its slots, because tensor-parallel ranks have different numbers of entries of each width.
        """
        bits = 16 if self.coding is None else 4
        return segment.num_slots * self._slot_bytes(self.geometry.rows_per_slot(bits))

    def _slot_bytes(self, per_head_slot: int) -> int:
        row_bytes = self.geometry.entry_dim * self.k_arena.element_size()
        draft_bytes = 0 if self.drafts is None else self.drafts.slot_bytes
        of_entry = 4 + 2 + (0 if per_head_slot == 1 else 2 * STEP_BYTES)  # position, key, and steps of both rows
        return self.geometry.num_runs * (row_bytes + per_head_slot * of_entry) + draft_bytes

    def rewrite(self, sources: Sources, num_slots: int, merge: MergePlan | None = None) -> Rewritten:
        """Write the kept entries of consecutive ranges of a path into the first of the ranges' slots.

        Segments and spans are not touched. No host sync. With rows of few bits a temporary holds the kept keys, encoded
        (at most a quarter of what the ranges take uncompressed, keys and values).

        Args:
            sources: the ranges, all that is alive of each, and the entries that are kept, in rows of how many bits.
            num_slots: token slots that hold them afterwards, at least as many as the entries take.
            merge: the weighted sums that replace the kept entries; its sources need not be kept. All rows have 16 bits.

        Raises:
            ValueError: more slots than the ranges hold, or fewer than the entries take.
        """
        held = sources.token_slots
        if not sources.fewest_slots <= num_slots <= held.numel():
            raise ValueError(
                f"num_slots: got {num_slots} for {sources.num_entries} entries of ranges of {held.numel()} slots; "
                f"allowed: {sources.fewest_slots} to {held.numel()}"
            )
        kept = sources.entries
        rows = kept
        if merge is not None:
            runs = merge.layers.long() * self.geometry.num_kv_heads + merge.heads
            rows = sources.at(runs, merge.indices)
        lens = [(each.bits, each.lens, each.num_entries) for each in sources.kept]
        packed = self._laid_out(held[:num_slots], lens, kept.positions)
        first, *narrower = packed.parts
        has_few_bits = bool(narrower) or first.bits != 16
        places = [(part.rows, part.bits) for part in packed.parts]
        temporary = None
        if has_few_bits:  # allocated before anything is written: without the memory everything stays as it is
            num_bytes = temporary_bytes(self.k_arena, places)
            temporary = torch.empty(num_bytes, dtype=torch.uint8, device=held.device)
        with accounting():
            if has_few_bits:
                recode_rows(*self._moved, kept.rows, kept.bits, sources.runs.int(), places, self.coding, temporary)
            elif merge is None:
                compact_kv(*self._moved, rows.rows, first.rows)
            else:
                weights = {"indptr": merge.indptr, "weights": merge.weights}
                compact_kv(*self._moved, rows.rows, first.rows, **weights)
            if self.drafts is not None:
                shadow = self.drafts.move(self._shadows(sources.ranges), sources.end, packed.token_slots)
                packed = replace(packed, shadow=shadow)
        return Rewritten(packed, kept, held[num_slots:])

    def _shadows(self, ranges: Sequence[Range]) -> list[Shadow]:
        """The draft's rows of each range."""
        assert self.drafts is not None
        return [
            self.drafts.every(each.token_slots, each.start)
            if isinstance(each, TokenRange)
            else each.segment.packed.shadow or self.drafts.absent()
            for each in ranges
        ]

    def _laid_out(self, token_slots: Tensor, lens: Sequence[tuple[int, Tensor, int]], positions: Tensor) -> Packed:
        """Storage whose rows are not written.

        ``lens``: of each part the bits of its rows, the entries of each run, [num_layers, num_kv_heads], int32, and of
        all runs; ``positions``, [num_entries], int32: of all entries, part after part.
        """
        parts: list[Rows] = []
        num_head_slots = 0
        own_positions = torch.split(positions, [count for *_, count in lens])
        for (bits, keep_lens, count), own in zip(lens, own_positions, strict=True):
            per_slot = self.geometry.rows_per_slot(bits)
            place = {"per_slot": per_slot, "first_cell": num_head_slots}
            indptr, rows = alloc_head_slots(keep_lens, token_slots, self.geometry.num_token_slots, count, **place)
            parts.append(Rows(bits, rows, own, indptr))
            num_head_slots += -(-count // per_slot)
        return Packed(token_slots.clone(), tuple(parts), self._no_shadow)

    def copy(self, sources: Sources) -> CopiedEntries:
        """Copy the kept entries of consecutive ranges of one path, as if one segment held them."""
        kept, first = sources.entries, 0
        parts = []
        for each in sources.kept:
            entries = slice(first, first + each.num_entries)
            first += each.num_entries
            k, v = self._copied(kept.rows[entries], kept.bits[entries], each.bits, each.runs)
            parts.append(CopiedRows(each.bits, each.lens, kept.positions[entries], k, v))
        return CopiedEntries(tuple(parts), kept.keys)

    def _copied(self, rows: Tensor, before: Tensor, bits: int, runs: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of rows that have so many bits, or more (``before``); see :class:`CopiedRows`."""
        if bits == 16:
            k, v = (as_words(arena.flatten(0, 2))[rows.long()].view(arena.dtype) for arena in self._moved)
            return k, v
        assert self.coding is not None
        return encoded_rows(*self._moved, rows, before, runs.int(), self.coding)

    def copy_shadow(self, sources: Sources) -> CopiedShadow | None:
        """Copy the draft's rows of consecutive ranges of one path; None: there is no draft.

        Of packed ones all rows; of uncompressed ones those that were paid most, as many as the kept entries' slots
        hold. A host sync reads how many rows a part of a segment's tokens has.
        """
        if self.drafts is None:
            return None
        bounds = [
            None if isinstance(each, TokenRange) or each.is_whole else (each.start, each.end) for each in sources.ranges
        ]
        is_whole = any(isinstance(each, TokenRange) for each in sources.ranges)
        most = sources.fewest_slots if is_whole else None
        return self.drafts.copy(list(zip(self._shadows(sources.ranges), bounds, strict=True)), most)

    def _placed(self, token_slots: Tensor, copied: CopiedEntries) -> Packed:
        """Storage in empty slots, with copied entries from any device in it."""
        device = token_slots.device
        lens = [(part.bits, part.keep_lens.to(device), part.positions.numel()) for part in copied.parts]
        packed = self._laid_out(token_slots, lens, torch.cat([part.positions for part in copied.parts]).to(device))
        for part, rows in zip(packed.parts, copied.parts, strict=True):
            k, v = (of_arena.contiguous().to(device) for of_arena in (rows.k, rows.v))
            if part.bits != 16:
                assert self.coding is not None
                write_encoded(*self._moved, part.rows, k, v, self.coding)
                continue
            for arena, of_arena in zip(self._moved, (k, v), strict=True):
                rows_by_head_slot(arena)[part.rows.long()] = as_moved(of_arena)
        return packed

    @accounting()
    def extended(self, packed: Packed, copied: CopiedEntries, token_slots: Tensor) -> Packed:
        """A segment's storage with further entries, from any device, as parts of their own in ``token_slots``.

        The rows that it has are not touched. ``token_slots``, [n], int64, are empty, and at least as many as needed.
        """
        added = self._placed(token_slots, copied)
        slots = torch.cat([packed.token_slots, token_slots])
        return Packed(slots, (*packed.parts, *added.parts), packed.shadow)

    @accounting()
    def new_segment(
        self,
        token_slots: Tensor,
        copied: CopiedEntries,
        start: int,
        end: int,
        *,
        shadow: CopiedShadow | None = None,
    ) -> Segment:
        """Write a packed segment of the tokens ``[start, end)`` into empty slots, from any device.

        There may be more ``token_slots`` than the entries need, because another rank needs more; InvariantError if
        there are fewer.
        """
        num_head_slots = self.geometry.head_slots_for(copied.sizes)
        if token_slots.numel() < self.geometry.slots_for(num_head_slots):
            raise InvariantError(f"entries of {num_head_slots} head slots in {token_slots.numel()} token slots")
        packed = self._placed(token_slots, copied)
        if self.drafts is not None and shadow is not None:
            packed = replace(packed, shadow=self.drafts.place(shadow, packed.token_slots))
        keys = None if copied.order is None else copied.order.to(token_slots.device)
        return Segment(self.geometry, start, end, packed, keys)


@dataclass(frozen=True, eq=False)
class Rewritten:
    """Result of a rewrite.

    Attributes:
        packed: where the kept entries lie now.
        kept: what is known of them; ``kept.rows`` are where they lay before.
        freed: [num_freed], int64, token slots that are free now.
    """

    packed: Packed
    kept: Entries
    freed: Tensor
