"""Sources of a rewrite: consecutive ranges of one path, where their entries lie, and which entries are kept.

A range is uncompressed (every token is an entry of every run, in its ordinary slot) or packed. The entries of all
ranges together are numbered within their run, (layer, head), by position: a :class:`Selection` and a
:class:`MergePlan` name them by this number. Of one uncompressed range it is the token's index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvevict_kernels.head_slots import head_slot_of
from kvevict_kernels.transfer import to_device
from sgl_kvevict.errors import InvariantError
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.prefix.arena_rows import largest_entries
from sgl_kvevict.prefix.span import Entries, View
from sgl_kvevict.ragged import Selection, run_entries


@dataclass(frozen=True, eq=False)
class TokenRange:
    """Uncompressed tokens of a path: ``token_slots``, [num_tokens], int64, in token order, from ``start`` on."""

    token_slots: Tensor
    start: int

    @property
    def end(self) -> int:
        """Logical position after the last token."""
        return self.start + self.token_slots.numel()


Part = TokenRange | View
"""A range of one path. A view that is rewritten is all that is alive of its segment (:func:`live_view`)."""


class Sources:
    """Consecutive ranges of one path, and the entries of theirs that are kept.

    Args:
        geometry: of the arena.
        parts: the ranges, in path order.
        selection: kept entries, numbered within their run over all parts. None: every entry; then one host sync reads
            how many a view has, if the host does not know it (:attr:`View.num_entries`).
    """

    def __init__(self, geometry: KVGeometry, parts: Sequence[Part], selection: Selection | None = None) -> None:
        self.geometry = geometry
        self.parts = parts
        self.selection = self._every() if selection is None else selection

    @property
    def start(self) -> int:
        """Logical position of the first token."""
        return self.parts[0].start

    @property
    def end(self) -> int:
        """Logical position after the last token."""
        return self.parts[-1].end

    @property
    def fewest_slots(self) -> int:
        """Token slots that the kept entries take."""
        return self.geometry.slots_for(self.selection.num_entries)

    @cached_property
    def token_slots(self) -> Tensor:
        """[num_slots], int64: token slots that the parts hold, in order; of a view those of its segment."""
        slots = [part.token_slots if isinstance(part, TokenRange) else part.segment.token_slots for part in self.parts]
        return slots[0] if len(slots) == 1 else torch.cat(slots)

    @cached_property
    def runs(self) -> Tensor:
        """[num_entries], int64: the run of each kept entry, ``layer * num_kv_heads + head``."""
        lens = self.selection.keep_lens.flatten().long()
        every = torch.arange(lens.numel(), device=lens.device)
        return torch.repeat_interleave(every, lens, output_size=self.selection.num_entries)

    def entries(self) -> Entries:
        """The kept entries, run after run."""
        return self.at(self.runs, self.selection.indices)

    def at(self, runs: Tensor, indices: Tensor) -> Entries:
        """Entries of the parts, kept or not, by run ([n], int64) and number within it ([n], int); syncs as ``Sources``.

        With several parts, a table of all their entries is made.
        """
        part = self.parts[0]
        if len(self.parts) > 1:
            return Entries.joined(self._tables).at(self._numbers(runs, indices))
        if isinstance(part, View):
            return part.segment.entries.at(self._cuts[0][0].long()[runs] + indices)
        geometry, run = self.geometry, runs.int()
        layers, heads = run // geometry.num_kv_heads, run % geometry.num_kv_heads
        slots = part.token_slots.int()[indices]  # all numbers fit int32
        head_slots: Tensor = head_slot_of(layers, slots, heads, geometry.num_token_slots, geometry.num_kv_heads)
        return Entries(head_slots, indices.int() + part.start)

    def best(self, num_slots: int) -> Sources:
        """Of the kept entries those of largest worth that ``num_slots`` token slots hold; no host sync.

        Of equal ones those of the lower run, then of the lower position. Layers with a sliding window keep their last
        tokens instead. InvariantError if the worth of some part is not known, or it does not have so many slots.
        """
        geometry, kept, held = self.geometry, self.entries(), self.token_slots.numel()
        if kept.worth is None or not 0 < num_slots <= held:
            known = "unknown" if kept.worth is None else "known"
            raise InvariantError(f"entries of {known} worth in {held} slots cannot shrink to {num_slots} slots")
        keys = kept.worth.int()
        if geometry.has_windows:
            keys = self._in_windows(keys, kept.positions, num_slots)
        num_entries = min(num_slots * geometry.num_runs, self.selection.num_entries)
        indptr = pad(self.selection.keep_lens.flatten().cumsum(0), (1, 0))
        chosen, lens = largest_entries(keys, indptr, num_entries)
        keep_lens = lens.view_as(self.selection.keep_lens)
        return Sources(geometry, self.parts, Selection(keep_lens, self.selection.indices[chosen], num_entries))

    def _every(self) -> Selection:
        lens = [lens for _, lens in self._cuts]
        return self._whole(lens[0] if len(lens) == 1 else torch.stack(lens).sum(0), sum(self._counts))

    def _whole(self, lens: Tensor, count: int) -> Selection:
        """Every entry of runs of these lengths, [num_runs], int, which sum to ``count``."""
        indices = run_entries(torch.zeros_like(lens), lens, count).int()
        return Selection(lens.int().view(self.geometry.num_layers, -1), indices, count)

    @cached_property
    def _cuts(self) -> list[tuple[Tensor, Tensor]]:
        """Of each part the starts of its runs, in the tensors of its segment or tokens, and their lengths: int."""
        cuts = []
        for part in self.parts:
            if isinstance(part, View):
                starts, lens = part.segment.cut(part.start, part.end)
            else:
                num_tokens = part.end - part.start
                runs = torch.arange(self.geometry.num_runs, dtype=torch.int32, device=part.token_slots.device)
                starts, lens = runs * num_tokens, torch.full_like(runs, num_tokens)
            cuts.append((starts.flatten(), lens.flatten()))
        return cuts

    @cached_property
    def _counts(self) -> list[int]:
        """Entries of each part."""
        num_runs = self.geometry.num_runs
        known = [
            num_runs * (part.end - part.start) if isinstance(part, TokenRange) else part.num_entries
            for part in self.parts
        ]
        counts = [count for count in known if count is not None]
        if len(counts) < len(known):
            counts = torch.stack([lens.sum() for _, lens in self._cuts]).tolist()
        return counts

    @cached_property
    def _tables(self) -> list[Entries]:
        """All entries of each part, run after run."""
        cuts = zip(self.parts, self._cuts, self._counts, strict=True)
        return [Sources(self.geometry, [part], self._whole(lens, count)).entries() for part, (_, lens), count in cuts]

    def _numbers(self, runs: Tensor, indices: Tensor) -> Tensor:
        """[n], int64: numbers in the joined tables of all parts; arguments of :meth:`at`."""
        before = runs.new_zeros(self.geometry.num_runs)
        numbers = torch.full_like(runs, -1)
        base = 0
        for (_, lens), count in zip(self._cuts, self._counts, strict=True):
            inside, first = indices - before[runs], lens.cumsum(0) - lens + base
            is_here = (inside >= 0) & (inside < lens[runs])
            numbers = torch.where(is_here, first[runs] + inside, numbers)
            before, base = before + lens, base + count
        return numbers

    def _in_windows(self, keys: Tensor, positions: Tensor, share: int) -> Tensor:
        """Change the keys ([num_entries], int32) of layers with a sliding window, so that they keep the last tokens.

        Entries of the window's last tokens, at most ``share`` per head, get the largest key, the layer's others the
        smallest. These ranges cannot be split, so all readers come after them.
        """
        reach = to_device(torch.tensor(self.geometry.windows).sub_(1).clamp_(max=share), keys.device)
        reach = reach[self.runs // self.geometry.num_kv_heads]  # -1: no window
        bounds = torch.iinfo(keys.dtype)
        kept = torch.where(positions >= self.end - reach, bounds.max, bounds.min).to(keys.dtype)
        return torch.where(reach < 0, keys, kept)
