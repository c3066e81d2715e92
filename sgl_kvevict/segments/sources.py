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
from kvevict_kernels.radix_select import largest_entries
from kvevict_kernels.transfer import to_device
from sgl_kvevict.errors import InvariantError
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.ragged import Selection, run_entries
from sgl_kvevict.segments.segment import Entries, View


@dataclass(frozen=True, eq=False)
class TokenRange:
    """Uncompressed tokens of a path.

    Attributes:
        token_slots: [num_tokens], int64, in token order.
        start: logical position of the first token.
        keys: [num_layers, num_kv_heads, num_tokens], int16, as in :class:`Order`; None: unknown.
        attention: float32, of the same shape, as in :class:`Segment`; None: nobody observes it.
    """

    token_slots: Tensor
    start: int
    keys: Tensor | None = None
    attention: Tensor | None = None

    @property
    def end(self) -> int:
        """Logical position after the last token."""
        return self.start + self.token_slots.numel()


Part = TokenRange | View
"""A range of one path. A view that is rewritten is all that is alive of its segment."""


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
        self._given = selection

    @cached_property
    def selection(self) -> Selection:
        """The kept entries."""
        if self._given is not None:
            return self._given
        return self._whole(self._lens, sum(self._counts))

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
        slots = [
            part.token_slots if isinstance(part, TokenRange) else part.segment.storage.token_slots
            for part in self.parts
        ]
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
        numbers = runs * part.token_slots.numel() + indices
        keys, attention = (None if all_ is None else all_.flatten()[numbers] for all_ in (part.keys, part.attention))
        return Entries(head_slots, indices.int() + part.start, keys, attention)

    def best(self, num_slots: int) -> Sources:
        """Of the kept entries the first in order that ``num_slots`` token slots hold; no host sync.

        Among equal ones those of the lower run, then of the lower position. Layers with a sliding window keep their
        last tokens instead, at most ``num_slots`` in each head; if other layers keep all, there are fewer entries.
        InvariantError if the order of some part is not known, or the parts have fewer slots.
        """
        geometry, keys, held = self.geometry, self._keys(), self.token_slots.numel()
        if keys is None or not 0 < num_slots <= held:
            known = "without" if keys is None else "with"
            raise InvariantError(f"entries {known} an order in {held} slots cannot shrink to {num_slots} slots")
        lens, count = (
            (self._lens, sum(self._counts))
            if self._given is None
            else (self._given.keep_lens.flatten(), self._given.num_entries)
        )
        if geometry.has_windows:
            keys = self._in_windows(keys.int(), num_slots)
            seen = geometry.tokens_to_keep(self.end - self.start, num_slots)
            count = min(count, geometry.num_kv_heads * sum(seen))
        num_entries = min(num_slots * geometry.num_runs, count)
        starts = pad(lens.cumsum(0), (1, 0))
        numbers, kept = largest_entries(keys, starts, num_entries)
        runs = torch.repeat_interleave(kept.long(), output_size=num_entries)
        indices = (numbers - starts[runs]).int() if self._given is None else self._given.indices[numbers]
        keep_lens = kept.view(geometry.num_layers, -1)
        return Sources(geometry, self.parts, Selection(keep_lens, indices, num_entries))

    def _keys(self) -> Tensor | None:
        """[num_entries], int16, of the kept entries, if it is known of all parts."""
        part = self.parts[0]
        if self._given is None and len(self.parts) == 1:
            if isinstance(part, TokenRange):
                return None if part.keys is None else part.keys.flatten()
            if part.is_whole:
                return part.segment.entries.keys
        return self.entries().keys

    @cached_property
    def _lens(self) -> Tensor:
        """[num_runs], int: entries of each run, over all parts."""
        lens = [lens for _, lens in self._cuts]
        return lens[0] if len(lens) == 1 else torch.stack(lens).sum(0)

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

    def _in_windows(self, keys: Tensor, share: int) -> Tensor:
        """Change the keys ([num_entries], int32) of layers with a sliding window, so that they keep the last tokens.

        Entries of the window's last tokens, at most ``share`` per head, get the largest key, the layer's others the
        smallest. These ranges cannot be split, so all readers come after them.
        """
        visible = to_device(torch.tensor(self.geometry.windows).sub_(1).clamp_(max=share), keys.device)
        visible = visible[self.runs // self.geometry.num_kv_heads]  # -1: no window
        bounds = torch.iinfo(keys.dtype)
        kept = torch.where(self.entries().positions >= self.end - visible, bounds.max, bounds.min).to(keys.dtype)
        return torch.where(visible < 0, keys, kept)
