"""Packer: writes segments of the KV arena, and copies and places their entries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvevict_kernels.alloc_head_slots import alloc_head_slots
from kvevict_kernels.compact_kv import compact_kv
from kvevict_kernels.recode_rows import encoded_rows, recode_rows, temporary_bytes, write_encoded
from kvevict_kernels.row_codec import RowCoding
from kvevict_kernels.row_sizes import ROWS_PER_SLOT, STEP_BYTES
from kvevict_kernels.stored_rows import as_moved, as_words
from sgl_kvevict.copies import CopiedEntries, CopiedRows, CopiedShadow, CopiedSinks
from sgl_kvevict.errors import InvariantError
from sgl_kvevict.geometry import ENTRY_BYTES, INDEX_BYTES, KVGeometry
from sgl_kvevict.guard import accounting
from sgl_kvevict.ragged import MergePlan
from sgl_kvevict.segments.arena_rows import ArenaRows
from sgl_kvevict.segments.segment import Packed, Rows, Segment, View
from sgl_kvevict.segments.shadow import DraftRows, Shadow
from sgl_kvevict.segments.sources import Range, Source, TokenRange


class SegmentPacker(ArenaRows):
    """Packs entries into token slots of one arena.

    Any head slot may hold an entry of any (layer, head), or several with fewer bits. So a segment whose entries fill
    ``C`` head slots takes ``ceil(C / (num_layers * num_kv_heads))`` token slots, however uneven its runs are.

    Args:
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

    def slot_bytes(self, bits: int = 16) -> int:
        """Bytes outside the pool of a token slot's entries of so many bits: keys, values, positions, order, draft's."""
        row_bytes = self.geometry.entry_dim * self.k_arena.element_size()
        draft_bytes = 0 if self.drafts is None else self.drafts.slot_bytes
        of_entry = INDEX_BYTES + (0 if bits == 16 else 2 * STEP_BYTES)
        return self.geometry.num_runs * (row_bytes + ROWS_PER_SLOT[bits] * of_entry) + draft_bytes

    def beside_bytes(self, num_entries: int) -> int:
        """Bytes on the device beside the pool: of so many entries, and the steps of all rows that it may hold."""
        steps = 0 if self.coding is None else self.coding.num_bytes
        return num_entries * ENTRY_BYTES + steps

    def bytes_of(self, segment: Segment) -> int:
        """Bytes that a segment's entries take at most outside the pool.

        They follow from its slots, because tensor-parallel ranks have different numbers of entries.
        """
        return segment.num_slots * self.slot_bytes(16 if self.coding is None else 4)

    def rewrite(self, source: Source, num_slots: int, merge: MergePlan | None = None) -> tuple[Packed, Tensor]:
        """Write the kept entries of a range into the first of its slots behind those of its sinks.

        Segments and spans are not touched. No host sync. With rows of few bits a temporary holds the kept keys, encoded
        (at most a quarter of what the range takes uncompressed, keys and values).

        Args:
            source: the range, all that is alive of it, and the entries that are kept, in rows of how many bits.
            num_slots: token slots that hold them afterwards, at least as many as the entries take.
            merge: the weighted sums that replace the kept entries; its sources need not be kept. All rows have 16 bits.

        Returns:
            Where the kept entries lie now, and [num_freed], int64: token slots that are free now.

        Raises:
            InvariantError: more slots than the range holds, or fewer than the entries take; rows of 4 bits without a
                coding.
        """
        held = source.token_slots
        if not source.fewest_slots <= num_slots <= held.numel():
            raise InvariantError(
                f"num_slots: got {num_slots} for {source.kept.num_entries} entries of a range of {held.numel()} slots; "
                f"allowed: {source.fewest_slots} to {held.numel()}"
            )
        entries, kept, temporary, shadow = source.entries, source.kept, None, None
        packed = self._laid_out(
            held[:num_slots], source.num_sinks, kept.bits, kept.lens, entries.positions, entries.keys
        )
        places = packed.rows.rows
        # All that is allocated here comes before anything is written: without the memory everything stays as it is.
        if kept.bits != 16:
            num_bytes = temporary_bytes(self.k_arena, kept.num_entries)
            temporary = torch.empty(num_bytes, dtype=torch.uint8, device=held.device)
            runs = kept.runs.int()
        elif merge is not None:
            of_merged = merge.layers.long() * self.geometry.num_kv_heads + merge.heads
            merged = source.at(of_merged, merge.indices).rows
        if self.drafts is not None:
            shadow = self._shadow(source.range)
            chosen, moved = self.drafts.chosen(shadow, source.end, packed.token_slots)
            packed = replace(packed, shadow=moved)
        # From here on rows are overwritten: an error would leave a segment that is neither the old one nor the new.
        with accounting():
            if kept.bits != 16:
                recode_rows(*self._moved, entries.rows, source.bits, runs, places, self._known_coding, temporary)
            elif merge is None:
                compact_kv(*self._moved, entries.rows, places)
            else:
                compact_kv(*self._moved, merged, places, indptr=merge.indptr, weights=merge.weights)
            if self.drafts is not None and shadow is not None:
                self.drafts.write(shadow, chosen, moved)
        return packed, held[num_slots:]

    @property
    def _known_coding(self) -> RowCoding:
        if self.coding is None:
            raise InvariantError("rows of 4 bits in a pool without statistics")
        return self.coding

    def _shadow(self, of: Range) -> Shadow:
        """The draft's rows of a range."""
        assert self.drafts is not None
        if isinstance(of, TokenRange):
            return self.drafts.every(of.token_slots, of.start)
        return of.segment.packed.shadow or self.drafts.absent()

    def _laid_out(
        self, slots: Tensor, num_sinks: int, bits: int, keep_lens: Tensor, positions: Tensor, keys: Tensor | None
    ) -> Packed:
        """Storage whose rows are not written; ``keep_lens``, [num_layers, num_kv_heads], int32: of each run."""
        sizes = self.geometry.num_token_slots, positions.numel()
        indptr, rows = alloc_head_slots(keep_lens, slots[num_sinks:], *sizes, per_slot=ROWS_PER_SLOT[bits])
        return Packed(slots.clone(), Rows(bits, rows, positions, indptr, keys), num_sinks, self._no_shadow)

    def copy(self, sources: Sequence[Source]) -> CopiedEntries:
        """Copy sinks and kept entries of consecutive ranges of one path, as if one segment held them.

        Rows have the fewest bits that the entries of a range have.
        """
        bits = min(source.kept.bits for source in sources)
        return CopiedEntries.joined([CopiedEntries(self.copied(each, bits), self._sinks(each)) for each in sources])

    def copied(self, source: Source, bits: int) -> CopiedRows:
        """Copies of kept entries, in rows of so many bits, which are no more than they have."""
        kept, entries = source.kept, source.entries
        if bits == 16:
            k, v = (as_words(arena.flatten(0, 2))[entries.rows.long()].view(arena.dtype) for arena in self._moved)
        else:
            k, v = encoded_rows(*self._moved, entries.rows, source.bits, kept.runs.int(), self._known_coding)
        return CopiedRows(kept.lens, entries.positions, k, v, entries.keys)

    def _sinks(self, source: Source) -> CopiedSinks | None:
        return CopiedSinks(*(arena[:, source.sink_slots] for arena in self._moved)) if source.num_sinks else None

    def copy_shadow(self, sources: Sequence[Source]) -> CopiedShadow | None:
        """Copy the draft's rows of consecutive ranges of one path; None: there is no draft.

        Of packed ones all rows; of an uncompressed one those that were paid most, as many as the kept entries' slots
        hold. A host sync reads how many rows a part of a segment's tokens has.
        """
        if self.drafts is None:
            return None
        parts, most = [], None
        for source in sources:
            is_part = isinstance(source.range, View) and not source.range.is_whole
            parts.append((self._shadow(source.range), (source.start, source.end) if is_part else None))
            most = source.fewest_slots if isinstance(source.range, TokenRange) else most
        return self.drafts.copy(parts, most)

    def _placed(self, token_slots: Tensor, copied: CopiedRows, num_sinks: int = 0) -> Packed:
        """Storage in empty slots, with copied entries from any device behind the sinks."""
        device = token_slots.device
        lens, k, v = (each.contiguous().to(device) for each in (copied.keep_lens, copied.k, copied.v))
        # Copies: from the host's memory they come as parts of one buffer, and would keep all its keys and values alive.
        positions = copied.positions.to(device, copy=True)
        keys = None if copied.order is None else copied.order.to(device, copy=True)
        packed = self._laid_out(token_slots, num_sinks, copied.bits, lens, positions, keys)
        if copied.bits != 16:
            write_encoded(*self._moved, packed.rows.rows, k, v, self._known_coding)
            return packed
        for arena, each in zip(self._moved, (k, v), strict=True):
            as_moved(arena.flatten(0, 2))[packed.rows.rows.long()] = as_moved(each)
        return packed

    def extended(self, packed: Packed, copied: CopiedRows, token_slots: Tensor) -> Packed:
        """A segment's storage with further entries, from any device, in ``token_slots``.

        The rows that it has are not touched, so after an error it is as before. ``token_slots``, [n], int64, are empty,
        and at least as many as needed.
        """
        rows = Rows.joined([packed.rows, self._placed(token_slots, copied).rows])
        return replace(packed, token_slots=torch.cat([packed.token_slots, token_slots]), rows=rows)

    def joined(self, segments: Sequence[Segment]) -> Packed:
        """The storage of consecutive segments of a path as that of one; no row is moved.

        A host sync reads how many rows of a draft model these are, if there is one.
        """
        slots = torch.cat([each.packed.token_slots for each in segments])
        # Only the first one can have sinks, the first tokens of the path.
        packed = Packed(slots, Rows.joined([each.packed.rows for each in segments]), segments[0].packed.num_sinks)
        if self.drafts is None:
            return packed
        # With bounds: a shadow may have rows of tokens that its segment has dropped, which the next one has.
        shadows = [(each.packed.shadow or self.drafts.absent(), (each.start, each.end)) for each in segments]
        return replace(packed, shadow=self.drafts.joined(shadows))

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
        needed, sinks = self.slots_of(copied), copied.sinks
        if token_slots.numel() < needed:
            raise InvariantError(f"entries of {needed} token slots in {token_slots.numel()}")
        packed = self._placed(token_slots, copied.rows, copied.num_sinks)
        if sinks is not None:
            for arena, each in zip(self._moved, (sinks.k, sinks.v), strict=True):
                arena[:, token_slots[: copied.num_sinks]] = each.to(arena.device)
        if self.drafts is not None and shadow is not None:
            packed = replace(packed, shadow=self.drafts.place(shadow, packed.token_slots))
        return Segment(self.geometry, start, end, packed)

    def slots_of(self, copied: CopiedEntries) -> int:
        """Token slots that copied entries take in the pool."""
        return copied.num_sinks + self.geometry.slots_for(copied.rows.num_entries, copied.rows.bits)
