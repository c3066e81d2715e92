"""Sources of a rewrite: ranges of one path, where their entries lie, and which are kept in rows of how many bits.

A range is uncompressed (every token is an entry of every run, in its ordinary slot) or packed, with rows of one or
several widths. All entries of all ranges are numbered: range after range, in a range part after part (:class:`Packed`),
in a part run after run, ascending by position.
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
from sgl_kvevict.config import Bits
from sgl_kvevict.errors import InvariantError
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.ragged import Selection, run_entries
from sgl_kvevict.segments.segment import Entries, View
from sgl_kvevict.widths import Part, rows_that_fit

_FIRST = 2**16
"""Larger than any key of an order; the smallest ones are above its negative."""
_SINK = 2**18
"""Added to keys of sinks: larger than any difference of keys."""
_WIDE = 2**20
"""Added to keys of entries whose rows are wide enough: larger than any difference of these."""


@dataclass(frozen=True, eq=False)
class TokenRange:
    """Uncompressed tokens of a path.

    Attributes:
        token_slots: [num_tokens], int64, in token order.
        start: logical position of the first token.
        keys: [num_layers, num_kv_heads, num_tokens], int16, as in :class:`Order`; None: unknown.
    """

    token_slots: Tensor
    start: int
    keys: Tensor | None = None

    @property
    def end(self) -> int:
        """Logical position after the last token."""
        return self.start + self.token_slots.numel()


Range = TokenRange | View
"""A range of one path. A view that is rewritten is all that is alive of its segment."""


@dataclass(frozen=True, eq=False)
class KeptRows:
    """Kept entries that get rows of one width.

    Attributes:
        bits: of a number of these rows.
        numbers: [num_entries], int64, the entries' numbers in :class:`Sources`, run after run, ascending by position.
        lens: [num_layers, num_kv_heads], int32, how many each run has.
    """

    bits: int
    numbers: Tensor
    lens: Tensor

    @property
    def num_entries(self) -> int:
        """Entries kept."""
        return self.numbers.numel()

    @property
    def runs(self) -> Tensor:
        """[num_entries], int64: the run of each entry, ``layer * num_kv_heads + head``."""
        return _runs_of(self.lens, self.num_entries)


@dataclass(frozen=True, eq=False)
class _Rows:
    """The entries of one range that have rows of one width.

    Attributes:
        bits: of their rows.
        starts: [num_runs], int: starts of the runs in the tensors of the part, or among a range's tokens.
        lens: [num_runs], int: entries of each run.
        count: of all runs.
    """

    bits: int
    starts: Tensor
    lens: Tensor
    count: int


class Sources:
    """Consecutive ranges of one path, and the entries of theirs that are kept.

    Args:
        geometry: of the arena.
        ranges: in path order; an uncompressed one is alone.
        kept: the kept entries by the width of their new rows, widest first. None: every entry, in rows as they are.
            One host sync reads how many entries a view has, if the host does not know it (:attr:`View.counts`).
    """

    def __init__(self, geometry: KVGeometry, ranges: Sequence[Range], kept: tuple[KeptRows, ...] | None = None) -> None:
        self.geometry = geometry
        self.ranges = ranges
        self._given = kept

    @cached_property
    def kept(self) -> tuple[KeptRows, ...]:
        """The kept entries by the width of their new rows, widest first."""
        if self._given is not None:
            return self._given
        widths = dict.fromkeys(part.bits for part in self._parts)
        return tuple(self._all_of(bits) for bits in sorted(widths, reverse=True))

    @property
    def selection(self) -> Selection | None:
        """The kept entries of one uncompressed range; None if they get narrower rows than they have."""
        (kept, *others), (first, *_) = self.kept, self.ranges
        if others or kept.bits != 16 or len(self.ranges) > 1 or not isinstance(first, TokenRange):
            return None
        indices = kept.numbers - kept.runs * first.token_slots.numel()
        return Selection(kept.lens, indices.int(), kept.num_entries)

    @property
    def num_entries(self) -> int:
        """Entries kept."""
        return sum(kept.num_entries for kept in self.kept)

    @property
    def counts(self) -> tuple[int, ...]:
        """Entries of all parts of all ranges, kept or not."""
        return tuple(part.count for part in self._parts)

    @property
    def start(self) -> int:
        """Logical position of the first token."""
        return self.ranges[0].start

    @property
    def end(self) -> int:
        """Logical position after the last token."""
        return self.ranges[-1].end

    @property
    def fewest_slots(self) -> int:
        """Token slots that the kept entries take."""
        parts = ((kept.bits, kept.num_entries) for kept in self.kept)
        return self.geometry.slots_for(self.geometry.head_slots_for(parts))

    @cached_property
    def token_slots(self) -> Tensor:
        """[num_slots], int64: token slots that the ranges hold, in order; of a view those of its segment."""
        slots = [
            each.token_slots if isinstance(each, TokenRange) else each.segment.packed.token_slots
            for each in self.ranges
        ]
        return slots[0] if len(slots) == 1 else torch.cat(slots)

    @cached_property
    def runs(self) -> Tensor:
        """[num_entries], int64: the run of each kept entry, ``layer * num_kv_heads + head``."""
        return torch.cat([kept.runs for kept in self.kept])

    @cached_property
    def entries(self) -> Entries:
        """The kept entries, in the order of :attr:`kept`; their rows are where they lie."""
        return self._look_up(torch.cat([kept.numbers for kept in self.kept]), self.runs)

    def at(self, runs: Tensor, indices: Tensor) -> Entries:
        """Entries of one uncompressed range, kept or not, by run ([n], int64) and index of their token ([n], int)."""
        return self._look_up(runs * (self.end - self.start) + indices, runs)

    def best(self, num_slots: int, bits: Bits = 16, num_sink_tokens: int = 0) -> Sources:
        """The best of all entries, as many as ``num_slots`` token slots hold; no host sync.

        :func:`rows_that_fit` says how many these are, and how many get rows of which width. The wider rows go to the
        best ones of those whose rows are as wide now: no row gets more bits. Those of 16 bits go to the first
        ``num_sink_tokens`` of the path, in every head.

        Of equal entries that of the lower run is the better one, then that of the earlier range, of the wider row and
        of the lower position. Layers with a sliding window keep their last tokens instead, in each head at most as many
        as it keeps on average; if other layers keep all, there are fewer entries.

        Raises:
            InvariantError: the ranges have fewer slots; or some entries have to go, or to get narrower rows than
                others, and the order of a range is not known.
        """
        geometry, held, count = self.geometry, self.token_slots.numel(), self._count
        if not 0 < num_slots <= held:
            raise InvariantError(f"entries in {held} slots cannot shrink to {num_slots} slots")
        plan, shown = self._plan(num_slots, count, bits, num_sink_tokens), 0
        if geometry.has_windows:
            if bits != 16:
                raise InvariantError(f"rows of {bits} bits of layers with sliding windows, which are cut by position")
            shown = sum(number for _, number in plan) // geometry.num_runs
            seen = geometry.num_kv_heads * sum(geometry.tokens_to_keep(self.end - self.start, shown))
            plan = self._plan(num_slots, min(seen, count), bits, num_sink_tokens)
        total, keys = sum(number for _, number in plan), None
        if total < count or len(plan) > 1:
            keys = self._keys_by_run()
            if keys is None:
                raise InvariantError(f"entries without an order in {held} slots cannot shrink to {num_slots} slots")
            if geometry.has_windows:
                keys = self._in_windows(keys.int(), shown)
        return self._with(self._chosen(plan, keys, 0 if bits == 16 else num_sink_tokens))

    def evicted(self, bits: int) -> Sources:
        """The entries that are not kept, all of them with rows of ``bits`` bits; no host sync."""
        is_evicted = torch.ones(self._count, dtype=torch.bool, device=self.token_slots.device)
        for kept in self.kept:
            is_evicted[kept.numbers] = False
        lens = self._lens.sum(0) - sum(kept.lens.flatten() for kept in self.kept)
        by_run = is_evicted if self._by_run is None else is_evicted[self._by_run]
        places = torch.nonzero_static(by_run, size=self._count - self.num_entries).squeeze(-1)
        return self._with((self._kept(bits, places, lens),))

    def _with(self, kept: tuple[KeptRows, ...]) -> Sources:
        """The same ranges, of which other entries are kept."""
        others = Sources(self.geometry, self.ranges, kept)
        others._parts = self._parts
        return others

    def _chosen(self, plan: tuple[Part, ...], keys: Tensor | None, num_sink_tokens: int) -> tuple[KeptRows, ...]:
        """Choose the entries of each planned width; ``keys`` are those of all entries by run.

        Of 16 bits sinks come first; of any width entries whose rows are as wide now, of which there are enough; among
        these, and then among all that are left, the best ones.
        """
        kept: list[KeptRows] = []
        lens = self._lens.sum(0)
        places = torch.arange(self._count, device=lens.device)  # by run, of those not chosen yet
        for i, (bits, number) in enumerate(plan):
            chosen, own = places, lens
            if number < places.numel():
                assert keys is not None
                is_last = i == len(plan) - 1
                ranks = self._ranks(keys[places] if i else keys, places, lens, bits, num_sink_tokens)
                first, own = largest_entries(ranks, pad(lens.cumsum(0), (1, 0)), number)
                chosen = places[first]
                if not is_last:
                    is_left = torch.ones_like(places, dtype=torch.bool)
                    is_left[first] = False
                    places = places[torch.nonzero_static(is_left, size=places.numel() - number).squeeze(-1)]
                    lens = lens - own
            kept.append(self._kept(bits, chosen, own))
        return tuple(kept)

    def _ranks(self, keys: Tensor, places: Tensor, lens: Tensor, bits: int, num_sink_tokens: int) -> Tensor:
        """The order in which entries get rows of a width that others do not get; ``keys`` are theirs."""
        numbers = places if self._by_run is None else self._by_run[places]
        if bits == 16 and self.start < num_sink_tokens:
            positions = self._look_up(numbers, _runs_of(lens, places.numel())).positions
            keys = keys.int() + (positions < num_sink_tokens).int() * _SINK
        if any(part.bits < bits for part in self._parts):
            keys = keys.int() + (self._table.bits[numbers] >= bits).int() * _WIDE
        return keys

    def _plan(self, num_slots: int, num_entries: int, bits: Bits, num_sink_tokens: int) -> tuple[Part, ...]:
        """See :func:`rows_that_fit`."""
        whole = sum(part.count for part in self._parts if part.bits == 16)
        sinks = max(min(num_sink_tokens, self.end) - self.start, 0) * self.geometry.num_runs
        return rows_that_fit(self.geometry, num_slots, num_entries, bits, num_sinks=sinks, num_whole=whole)

    def _kept(self, bits: int, places: Tensor, lens: Tensor) -> KeptRows:
        """Kept entries, given their places by run."""
        numbers = places if self._by_run is None else self._by_run[places]
        lens = lens.int()
        if self._interleaves:
            numbers = self._by_position(numbers, lens)
        return KeptRows(bits, numbers, lens.view(self.geometry.num_layers, -1))

    def _keys_by_run(self) -> Tensor | None:
        """[num_entries], int16, keys of all entries by run, if they are known of all ranges."""
        first = self.ranges[0]
        if len(self.ranges) == 1 and isinstance(first, TokenRange):
            return None if first.keys is None else first.keys.flatten()
        keys = self._table.keys
        return keys if keys is None or self._by_run is None else keys[self._by_run]

    def _in_windows(self, keys: Tensor, shown: int) -> Tensor:
        """Change the keys, by run, of layers with a sliding window, so that they keep the last tokens.

        Entries of the window's last tokens, at most ``shown`` per head, get the largest key, the layer's others the
        smallest. These ranges cannot be split, so all readers come after them.
        """
        lens = self._lens.sum(0)
        runs = _runs_of(lens, self._count)
        every = torch.arange(self._count, device=lens.device) if self._by_run is None else self._by_run
        positions = self._look_up(every, runs).positions
        reach = to_device(torch.tensor(self.geometry.windows).sub_(1).clamp_(max=shown), keys.device)
        reach = reach[runs // self.geometry.num_kv_heads]  # -1: no window
        kept = torch.where(positions >= self.end - reach, _FIRST, -_FIRST).to(keys.dtype)
        return torch.where(reach < 0, keys, kept)

    # ---- all entries ------------------------------------------------------------------------------------------

    @cached_property
    def _parts(self) -> list[_Rows]:
        """The entries of each range, by the width of their rows; range after range."""
        runs = torch.arange(self.geometry.num_runs, dtype=torch.int32, device=self.token_slots.device)
        found: list[tuple[int, Tensor, Tensor, int | None]] = []
        for each in self.ranges:
            if isinstance(each, TokenRange):
                num_tokens = each.end - each.start
                lens = torch.full_like(runs, num_tokens)
                found.append((16, runs * num_tokens, lens, num_tokens * self.geometry.num_runs))
                continue
            parts, cuts = each.segment.packed.parts, each.segment.cut(each.start, each.end)
            counts: Sequence[int | None] = each.counts or [None] * len(parts)
            found += [(part.bits, *cut, count) for part, cut, count in zip(parts, cuts, counts, strict=True)]
        known = [count for *_, count in found]
        if None in known:
            known = torch.stack([lens.sum() for _, _, lens, _ in found]).tolist()
        return [
            _Rows(bits, starts, lens, count or 0) for (bits, starts, lens, _), count in zip(found, known, strict=True)
        ]

    @cached_property
    def _count(self) -> int:
        """All entries."""
        return sum(part.count for part in self._parts)

    @cached_property
    def _lens(self) -> Tensor:
        """[num_parts, num_runs], int: entries of each run."""
        return torch.stack([part.lens for part in self._parts])

    @cached_property
    def _firsts(self) -> Tensor:
        """[num_parts, num_runs], int64: number of the first entry of each run."""
        lens = self._lens.flatten()
        return (lens.cumsum(0) - lens).view(self._lens.shape)

    @cached_property
    def _by_run(self) -> Tensor | None:
        """[num_entries], int64: numbers of all entries by run, in a run part after part; None: they ascend."""
        if len(self._parts) == 1:
            return None
        return run_entries(self._firsts.T, self._lens.T, self._count)

    @property
    def _interleaves(self) -> bool:
        """Whether positions need not ascend within a run, because a range has its entries in several parts."""
        return len(self._parts) > len(self.ranges)

    def _all_of(self, bits: int) -> KeptRows:
        """Every entry with rows of one width."""
        places = [i for i, part in enumerate(self._parts) if part.bits == bits]
        count, lens = sum(self._parts[i].count for i in places), self._lens[places]
        numbers = run_entries(self._firsts[places].T, lens.T, count)
        if len(places) > 1 and self._interleaves:  # maybe one range has several of them, and another has none
            numbers = self._by_position(numbers, lens.sum(0))
        return KeptRows(bits, numbers, lens.sum(0).int().view(self.geometry.num_layers, -1))

    def _by_position(self, numbers: Tensor, lens: Tensor) -> Tensor:
        """Numbers of entries run after run, sorted by position within each run."""
        runs = _runs_of(lens, numbers.numel())
        return numbers[((runs << 32) | self._table.positions[numbers]).argsort()]

    def _look_up(self, numbers: Tensor, runs: Tensor) -> Entries:
        """Entries by number, [n], int64, and run."""
        first = self.ranges[0]
        if len(self.ranges) == 1 and isinstance(first, TokenRange):
            return self._of_tokens(first, numbers, runs)
        return self._table.at(numbers)

    @cached_property
    def _table(self) -> Entries:
        """All entries of packed ranges."""
        tables, own_parts = [], iter(self._parts)
        for each in self.ranges:
            assert isinstance(each, View)
            parts, base, numbers_of = each.segment.packed.parts, 0, []
            for part in parts:
                own = next(own_parts)
                numbers_of.append(run_entries(own.starts, own.lens, own.count) + base)
                base += part.num_entries
            entries = each.segment.entries
            is_all = sum(numbers.numel() for numbers in numbers_of) == base
            tables.append(entries if is_all else entries.at(torch.cat(numbers_of)))
        return Entries.joined(tables)

    def _of_tokens(self, tokens: TokenRange, numbers: Tensor, runs: Tensor) -> Entries:
        """Entries of an uncompressed range, numbered within it."""
        geometry, run = self.geometry, runs.int()
        layers, heads = run // geometry.num_kv_heads, run % geometry.num_kv_heads
        indices = numbers - runs * tokens.token_slots.numel()
        slots = tokens.token_slots.int()[indices]  # all numbers fit int32
        rows: Tensor = head_slot_of(layers, slots, heads, geometry.num_token_slots, geometry.num_kv_heads)
        keys = None if tokens.keys is None else tokens.keys.flatten()[numbers]
        return Entries(rows, indices.int() + tokens.start, torch.full_like(rows, 16, dtype=torch.int8), keys)


def _runs_of(lens: Tensor, count: int) -> Tensor:
    """[count], int64: the run of each entry; ``lens``, int, of any shape, has the entries of each run."""
    lens = lens.flatten().long()
    return torch.repeat_interleave(torch.arange(lens.numel(), device=lens.device), lens, output_size=count)
