"""Source of a rewrite or a copy: a range of a path, where its entries lie, and which of them are kept.

A range is uncompressed (every token is an entry of every run, in its ordinary slot) or packed. Its sinks stay what they
are. The entries of its other tokens are numbered run after run, ascending by position.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvevict_kernels.radix_select import largest_entries
from kvevict_kernels.row_sizes import ROWS_PER_SLOT, head_slot_of
from kvevict_kernels.transfer import to_device
from sgl_kvevict.config import Bits
from sgl_kvevict.errors import InvariantError
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.ragged import run_entries, runs_of
from sgl_kvevict.segments.segment import View

_FIRST = 2**16
"""Larger than any key of an order; the smallest ones are above its negative."""


@dataclass(frozen=True, eq=False)
class TokenRange:
    """Uncompressed tokens of a path.

    Attributes:
        token_slots: [num_tokens], int64, in token order.
        start: logical position of the first token.
        keys: [num_layers, num_kv_heads, num_tokens], int16, as in :class:`Order`; None: unknown.
        num_sinks: its first tokens that stay what they are.
    """

    token_slots: Tensor
    start: int
    keys: Tensor | None = None
    num_sinks: int = 0

    @property
    def end(self) -> int:
        """Logical position after the last token."""
        return self.start + self.token_slots.numel()


@dataclass(frozen=True, eq=False)
class Entries:
    """Entries of a range: tensors of [num_entries], in one order.

    Attributes:
        rows: int32, where they lie, as in :class:`Rows`.
        positions: int32, logical positions of their tokens.
        keys: int16, as in :class:`Order`; None: unknown.
    """

    rows: Tensor
    positions: Tensor
    keys: Tensor | None

    def at(self, numbers: Tensor) -> Entries:
        """The entries with these numbers, [n], int64, in this order."""
        keys = None if self.keys is None else self.keys[numbers]
        return Entries(self.rows[numbers], self.positions[numbers], keys)


Range = TokenRange | View
"""A range of one path. A view that is rewritten is all that is alive of its segment."""


@dataclass(frozen=True, eq=False)
class KeptRows:
    """Kept entries.

    Attributes:
        bits: of a number of the rows that they get.
        numbers: [num_entries], int64, the entries' numbers in :class:`Source`, ascending; None: all.
        lens: [num_layers, num_kv_heads], int32, how many each run has.
        num_entries: how many they are.
    """

    bits: int
    numbers: Tensor | None
    lens: Tensor
    num_entries: int

    @property
    def runs(self) -> Tensor:
        """[num_entries], int64: the run of each entry, ``layer * num_kv_heads + head``."""
        return runs_of(self.lens, self.num_entries)


class Source:
    """A range of a path, and the entries of it that are kept.

    ``kept`` None: every entry, in rows as they are. One host sync reads how many entries a view has, if the host does
    not know it (:attr:`View.count`).
    """

    def __init__(self, geometry: KVGeometry, of: Range, kept: KeptRows | None = None) -> None:
        self.geometry = geometry
        self.range = of
        self.start, self.end, self.num_sinks = of.start, of.end, of.num_sinks
        self._given = kept

    @property
    def bits(self) -> int:
        """Of the rows of all entries, as they are."""
        return 16 if isinstance(self.range, TokenRange) else self.range.segment.packed.rows.bits

    @cached_property
    def kept(self) -> KeptRows:
        """The kept entries."""
        return self._given or self._kept(self.bits, None, self._lens, self.count)

    @property
    def fewest_slots(self) -> int:
        """Token slots that the sinks and the kept entries take."""
        return self.num_sinks + self.geometry.slots_for(self.kept.num_entries, self.kept.bits)

    @property
    def token_slots(self) -> Tensor:
        """[num_slots], int64: token slots that the range holds, or the whole segment of a view."""
        return self.range.token_slots if isinstance(self.range, TokenRange) else self.range.segment.packed.token_slots

    @property
    def sink_slots(self) -> Tensor:
        """[num_sinks], int64: token slots of the sinks."""
        first = 0 if isinstance(self.range, TokenRange) else self.start - self.range.segment.start
        return self.token_slots[first : first + self.num_sinks]

    @property
    def mask(self) -> Tensor | None:
        """[num_layers, num_kv_heads, num_tokens], bool: the kept entries; None if others may not merge into them."""
        kept = self.kept
        if kept.numbers is None or kept.bits != 16 or self.num_sinks or not isinstance(self.range, TokenRange):
            return None
        mask = torch.zeros(self.count, dtype=torch.bool, device=self.token_slots.device)
        mask[kept.numbers] = True
        return mask.view(self.geometry.num_layers, self.geometry.num_kv_heads, -1)

    @cached_property
    def entries(self) -> Entries:
        """The kept entries; their rows are where they lie."""
        kept = self.kept
        if isinstance(self.range, TokenRange):
            return self._of_tokens(self.range, self._numbers(kept), kept.runs)
        return self._table if kept.numbers is None else self._table.at(kept.numbers)

    def at(self, runs: Tensor, indices: Tensor) -> Entries:
        """Entries of an uncompressed range, kept or not, by run ([n], int64) and index of their token ([n], int)."""
        assert isinstance(self.range, TokenRange)
        return self._of_tokens(self.range, runs * self._num_tokens + indices - self.num_sinks, runs)

    def best(self, num_slots: int, bits: Bits = 16) -> Source:
        """The sinks and the best of all other entries, as many as ``num_slots`` token slots hold; no host sync.

        Rows have 16 bits if that is ``bits``, or if they have 16 now and all fit; else 4. Numbers on the host alone
        decide, so tensor-parallel ranks agree.

        Of equal entries that of the lower run is the better one, then that of the lower position. Layers with a sliding
        window keep their last tokens instead, at most as many in each head as it keeps on average. If the other layers
        keep all, there are fewer entries.

        Raises:
            InvariantError: the range has fewer slots, or more sinks; or entries have to go whose order is not known.
        """
        geometry, held, count = self.geometry, self.token_slots.numel(), self.count
        if not max(self.num_sinks, 1) <= num_slots <= held:
            raise InvariantError(f"entries in {held} slots cannot shrink to {num_slots} slots")
        cells = (num_slots - self.num_sinks) * geometry.num_runs
        width = 16 if bits == 16 or (self.bits == 16 and count <= cells) else 4
        number, shown = min(count, cells * ROWS_PER_SLOT[width]), 0
        if geometry.has_windows:
            if width != 16:
                raise InvariantError(f"rows of {width} bits of layers with sliding windows, which are cut by position")
            shown = number // geometry.num_runs
            seen = geometry.num_kv_heads * sum(geometry.tokens_to_keep(self.end - self.start, shown))
            number = min(number, seen)
        if number == count:
            return self._with(self._kept(width, None, self._lens, count))
        keys = self._keys
        if keys is None:
            raise InvariantError(f"entries without an order in {held} slots cannot shrink to {num_slots} slots")
        if geometry.has_windows:
            keys = self._in_windows(keys.int(), shown)
        numbers, lens = largest_entries(keys, pad(self._lens.cumsum(0), (1, 0)), number)
        return self._with(self._kept(width, numbers, lens, number))

    def evicted(self, bits: int) -> Source:
        """The entries that are not kept, all of them with rows of ``bits`` bits; no host sync."""
        kept, is_evicted = self.kept, torch.ones(self.count, dtype=torch.bool, device=self.token_slots.device)
        is_evicted[slice(None) if kept.numbers is None else kept.numbers] = False
        count = self.count - kept.num_entries
        numbers = torch.nonzero_static(is_evicted, size=count).squeeze(-1)
        return self._with(self._kept(bits, numbers, self._lens - kept.lens.flatten(), count))

    def _with(self, kept: KeptRows) -> Source:
        """The same range, of which other entries are kept."""
        other = Source(self.geometry, self.range, kept)
        other.count = self.count
        if isinstance(self.range, View):
            other._cut = self._cut
        return other

    def _kept(self, bits: int, numbers: Tensor | None, lens: Tensor, count: int) -> KeptRows:
        return KeptRows(bits, numbers, lens.int().view(self.geometry.num_layers, -1), count)

    def _numbers(self, kept: KeptRows) -> Tensor:
        """[num_entries], int64: numbers of kept entries."""
        return torch.arange(self.count, device=self.token_slots.device) if kept.numbers is None else kept.numbers

    def _in_windows(self, keys: Tensor, shown: int) -> Tensor:
        """Change the keys of layers with a sliding window, so that they keep the last tokens.

        Entries of the window's last tokens, at most ``shown`` per head, get the largest key, the layer's others the
        smallest. These ranges cannot be split, so all readers come after them.
        """
        runs = runs_of(self._lens, self.count)
        positions = Source(self.geometry, self.range).entries.positions
        reach = to_device(torch.tensor(self.geometry.windows).sub_(1).clamp_(max=shown), keys.device)
        reach = reach[runs // self.geometry.num_kv_heads]  # -1: no window
        kept = torch.where(positions >= self.end - reach, _FIRST, -_FIRST).to(keys.dtype)
        return torch.where(reach < 0, keys, kept)

    # ---- all entries ------------------------------------------------------------------------------------------

    @property
    def _num_tokens(self) -> int:
        """Tokens behind the sinks."""
        return self.end - self.start - self.num_sinks

    @cached_property
    def _cut(self) -> tuple[Tensor, Tensor]:
        """Starts and lengths, [num_runs], int32 each, of the runs of the segment's rows that are in a view."""
        assert not isinstance(self.range, TokenRange)
        return self.range.segment.cut(self.start + self.num_sinks, self.end)

    @property
    def _lens(self) -> Tensor:
        """[num_runs], int32: entries of each run."""
        if isinstance(self.range, TokenRange):
            device = self.token_slots.device
            return torch.full((self.geometry.num_runs,), self._num_tokens, dtype=torch.int32, device=device)
        return self._cut[1]

    @cached_property
    def count(self) -> int:
        """All entries, kept or not, without those of sinks."""
        if isinstance(self.range, TokenRange):
            return self._num_tokens * self.geometry.num_runs
        count = self.range.count
        return int(self._lens.sum()) if count is None else count

    @property
    def _keys(self) -> Tensor | None:
        """[count], int16, the keys of all entries, if they are known."""
        if isinstance(self.range, TokenRange):
            keys = self.range.keys
            return None if keys is None else keys[..., self.num_sinks :].flatten()
        return self._table.keys

    @cached_property
    def _table(self) -> Entries:
        """All entries of a view."""
        assert not isinstance(self.range, TokenRange)
        rows = self.range.segment.packed.rows
        entries, is_all = Entries(rows.rows, rows.positions, rows.keys), self.count == rows.num_entries
        return entries if is_all else entries.at(run_entries(*self._cut, self.count))

    def _of_tokens(self, tokens: TokenRange, numbers: Tensor, runs: Tensor) -> Entries:
        """Entries of an uncompressed range by number, [n], int64, and run."""
        geometry, run = self.geometry, runs.int()
        layers, heads = run // geometry.num_kv_heads, run % geometry.num_kv_heads
        indices = numbers - runs * self._num_tokens + self.num_sinks
        slots = tokens.token_slots.int()[indices]  # all numbers fit int32
        rows: Tensor = head_slot_of(layers, slots, heads, geometry.num_token_slots, geometry.num_kv_heads)
        keys = self._keys
        return Entries(rows, indices.int() + tokens.start, None if keys is None else keys[numbers])
