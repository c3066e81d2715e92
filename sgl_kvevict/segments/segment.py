"""Segments (ranges of one path that are compressed as a unit) and spans (the parts of segments that nodes hold).

A segment has the best entries of its tokens, in token slots of its own. They may have rows of several widths (16 and 4
bits), each a *part* of its own. Entries are numbered part after part, in a part run after run, ascending by position;
everything that is known of each entry (its order) travels by this number.

A span is a view of a segment's tokens ``[start, end)``, held by one tree node. All spans of a segment lie on
consecutive nodes of one path. The one nearest the root, the *owner*, outlives the others and carries all the token
slots of the segment in the accounting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kvevict_kernels.cut_runs import cut_runs
from kvevict_kernels.span_runs import SpanRuns
from sgl_kvevict.copies import CopiedRows
from sgl_kvevict.errors import InvariantError
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.segments.shadow import Shadow


@dataclass(frozen=True, eq=False)
class Entries:
    """Everything that is known of some entries: tensors of [num_entries], in one order.

    Attributes:
        rows: int32, where the entries lie: numbers of rows of the entry's width, as in :class:`Rows`.
        positions: int32, logical positions of their tokens.
        bits: int8, widths of their rows.
        keys: int16, as in :class:`Order`; None: unknown.
    """

    rows: Tensor
    positions: Tensor
    bits: Tensor
    keys: Tensor | None = None

    def at(self, numbers: Tensor) -> Entries:
        """The entries with these numbers, [n], int64, in this order."""
        keys = None if self.keys is None else self.keys[numbers]
        return Entries(self.rows[numbers], self.positions[numbers], self.bits[numbers], keys)

    @staticmethod
    def joined(parts: Sequence[Entries]) -> Entries:
        """All entries, one part after the other; what is not known of one part is not known of any."""
        if len(parts) == 1:
            return parts[0]
        keys = [part.keys for part in parts if part.keys is not None]
        rows, positions, bits = (
            torch.cat([getattr(part, name) for part in parts]) for name in ("rows", "positions", "bits")
        )
        return Entries(rows, positions, bits, torch.cat(keys) if len(keys) == len(parts) else None)


@dataclass(frozen=True, eq=False)
class Order:
    """The order of a range of uncompressed tokens, in which entries are evicted, the smallest key first.

    See :mod:`sgl_kvevict.policies.order`.

    Attributes:
        launched: returns the keys, [num_layers, num_kv_heads, num_tokens], int16. Where they are computed beside the
            scheduler's stream, the host waits until they are.
        start: logical position of the first token of the range.
        end: logical position after its last one.
        turn: turn of the scheduler's loop in which they were launched beside its stream; None: they are here.
        check: raises ValueError if the keys cannot be used; called once they are computed.
    """

    launched: Callable[[], Tensor]
    start: int
    end: int
    turn: int | None = None
    check: Callable[[], None] = lambda: None

    @property
    def keys(self) -> Tensor:
        """The keys; ValueError if the policy's scores, or its choice, were wrong."""
        keys = self.launched()
        self.check()
        return keys

    def within(self, start: int, end: int) -> Order:
        """The order of the tokens ``[start, end)`` of the range, logical positions; no copy."""
        launched, first, last = self.launched, start - self.start, end - self.start
        return replace(self, launched=lambda: launched()[..., first:last], start=start, end=end)


@dataclass(frozen=True, eq=False)
class Rows:
    """Entries of a segment whose rows have one width.

    A row of ``bits`` has the number ``head_slot * KVGeometry.rows_per_slot(bits) + part``; of 16 bits that of its head
    slot.

    Attributes:
        bits: of a number of a row: 16 (as the pool stores it) or 4 (:mod:`kvevict_kernels.row_codec`).
        rows: [num_entries], int32, run after run in (layer, head) order.
        positions: [num_entries], int32, logical position of each entry's token, ascending within a run.
        indptr: [num_layers * num_kv_heads + 1], int32, start of each run.
    """

    bits: int
    rows: Tensor
    positions: Tensor
    indptr: Tensor

    @property
    def num_entries(self) -> int:
        """Entries stored, including those of tokens whose nodes are gone."""
        return self.rows.numel()

    def cut(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Starts and lengths, [num_runs], int32 each, of the runs' entries of the tokens ``[start, end)``."""
        return cut_runs(self.positions, self.indptr, start, end)


@dataclass(frozen=True, eq=False)
class Packed:
    """Storage of a segment.

    Attributes:
        token_slots: [num_slots], int64, token slots held exclusively.
        parts: its entries by the width of their rows, widest first; a part may be empty. Entries that came back
            (:meth:`Segment.grow`) are parts of their own behind these.
        shadow: the draft model's rows in the slots; None: there is no draft model.
    """

    token_slots: Tensor
    parts: tuple[Rows, ...]
    shadow: Shadow | None = None

    @property
    def num_entries(self) -> int:
        """Entries stored, including those of tokens whose nodes are gone."""
        return sum(part.num_entries for part in self.parts)

    @property
    def positions(self) -> Tensor:
        """[num_entries], int32, logical position of each entry's token, part after part."""
        positions = [part.positions for part in self.parts]
        return positions[0] if len(positions) == 1 else torch.cat(positions)


@dataclass(eq=False)
class Segment:
    """The tokens ``[start, end)`` of a path (logical positions), which are compressed as a unit.

    It is the same object for life: a resize, or growth, replaces ``packed``.

    Attributes:
        packed: where its entries lie.
        keys: [num_entries], int16, by which its entries are evicted, the smallest first; None: unknown, so it cannot
            shrink.
        splittable: False if layers with sliding windows keep only their last tokens.
        is_rest: the end of an unsplittable segment was dropped; the rest is never found again.
        num_spans: nodes that hold a part of it.
        live_end: logical position after its last token that a node still holds.
        live_counts: entries of tokens before ``live_end``, of each part.
    """

    geometry: KVGeometry
    start: int
    end: int
    packed: Packed
    keys: Tensor | None = None
    splittable: bool = True
    is_rest: bool = False
    num_spans: int = 0
    live_end: int = field(init=False)
    live_counts: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self._all_live()

    def _all_live(self) -> None:
        self.live_end, self.live_counts = self.end, tuple(part.num_entries for part in self.packed.parts)

    @property
    def num_tokens(self) -> int:
        """Logical length."""
        return self.end - self.start

    @property
    def num_slots(self) -> int:
        """Token slots that it holds."""
        return self.packed.token_slots.numel()

    @property
    def num_entries(self) -> int:
        """Entries stored, including those of tokens whose nodes are gone."""
        return self.packed.num_entries

    @property
    def num_live_entries(self) -> int:
        """Entries of tokens that a node still holds."""
        return sum(self.live_counts)

    @property
    def entries_by_bits(self) -> dict[int, int]:
        """Entries of tokens that a node still holds, by the bits of their rows; without widths that no entry has."""
        entries = Counter[int]()
        for part, count in zip(self.packed.parts, self.live_counts, strict=True):
            entries[part.bits] += count
        return dict(+entries)

    @property
    def num_bytes(self) -> int:
        """Bytes of its token slots."""
        return self.num_slots * self.geometry.slot_bytes

    @property
    def tokens_per_slot(self) -> float:
        """Tokens of prefill that each of its slots saves."""
        return float("-inf") if self.is_rest else self.num_tokens / max(self.num_slots, 1)

    @property
    def live_view(self) -> View:
        """All that nodes still hold of it."""
        return View(self, self.start, self.live_end)

    @property
    def entries(self) -> Entries:
        """All entries stored, part after part."""
        return replace(Entries.joined([entries_of(part) for part in self.packed.parts]), keys=self.keys)

    def pack(self, packed: Packed, end: int, kept: Entries) -> None:
        """Replace the storage by one that holds what is known of ``kept``, the entries of tokens before ``end``."""
        self.packed, self.end, self.keys = packed, end, kept.keys
        self._all_live()

    def grow(self, packed: Packed, keys: Tensor) -> None:
        """Replace the storage by one with further parts, of entries that a node still holds; ``keys`` are theirs."""
        assert self.keys is not None
        self.keys = torch.cat([self.keys, keys])
        self.live_counts += tuple(part.num_entries for part in packed.parts[len(self.packed.parts) :])
        self.packed = packed

    def runs_of(self, start: int, end: int) -> tuple[SpanRuns, ...]:
        """The entries of tokens ``[start, end)``, by the width of their rows."""
        shape = (self.geometry.num_layers, self.geometry.num_kv_heads)
        runs = []
        for i, (part, cut) in enumerate(zip(self.packed.parts, self.cut(start, end), strict=True)):
            starts, lens = (bounds.view(shape) for bounds in cut)
            known = part.positions, part.bits, i == 0
            runs.append(SpanRuns(part.rows, starts, lens, end - start, *known))
        return tuple(runs)

    def cut(self, start: int, end: int) -> list[tuple[Tensor, Tensor]]:
        """Of each part starts and lengths, [num_runs], int32 each, of the runs' entries in ``[start, end)``."""
        if start <= self.start and end >= self.end:
            return [(part.indptr[:-1], part.indptr.diff()) for part in self.packed.parts]
        return [part.cut(start, end) for part in self.packed.parts]


def entries_of(part: Rows) -> Entries:
    """The entries of one part, without what is known of them beside."""
    return Entries(part.rows, part.positions, torch.full_like(part.rows, part.bits, dtype=torch.int8))


class Span:
    """The KV of the tokens ``[start, end)`` of a path, held by one tree node as a part of a segment.

    The owner (``is_owner``) is the segment's topmost live span. A resize moves entries; then :meth:`runs` returns a new
    object.
    """

    def __init__(self, segment: Segment, start: int, end: int, *, is_owner: bool) -> None:
        self.segment = segment
        self.start = start
        self.end = end
        self.is_owner = is_owner
        self._packed: Packed | None = None  # of which the runs are
        self._runs: tuple[SpanRuns, ...] | None = None
        self._draft_runs: SpanRuns | None = None
        segment.num_spans += 1

    @property
    def num_tokens(self) -> int:
        """Logical length."""
        return self.end - self.start

    @property
    def charged_slots(self) -> int:
        """Token slots in the accounting: all of the segment's for its owner, else 0."""
        return self.segment.num_slots if self.is_owner else 0

    def runs(self) -> tuple[SpanRuns, ...]:
        """The entries of ``[start, end)``, by the width of their rows.

        Computed at the first call, on the caller's stream, so that a split takes host work only and may happen while a
        forward reads the span.
        """
        self._follow()
        if self._runs is None:
            self._runs = self.segment.runs_of(self.start, self.end)
        return self._runs

    def draft_runs(self) -> SpanRuns:
        """Rows of ``[start, end)`` that the draft model reads; the same object until the segment is resized."""
        self._follow()
        if self._draft_runs is None:
            shadow = self.segment.packed.shadow
            if shadow is None:
                raise InvariantError("a draft model reads a segment that was written without one")
            self._draft_runs = shadow.runs(self.start, self.end)
        return self._draft_runs

    def _follow(self) -> None:
        if self._packed is not self.segment.packed:
            self._packed, self._runs, self._draft_runs = self.segment.packed, None, None

    def split(self, position: int) -> tuple[Span, Span]:
        """Split at a logical position, without copies; this span must not be used afterwards.

        The first half, nearer the root, inherits ownership. InvariantError if the position is not inside the span, or
        the segment cannot be split.
        """
        if not self.start < position < self.end:
            raise InvariantError(f"split position {position} is not inside the span [{self.start}, {self.end})")
        if not self.segment.splittable:
            raise InvariantError(f"the span [{self.start}, {self.end}) cannot be split")
        self.segment.num_spans -= 1
        upper = Span(self.segment, self.start, position, is_owner=self.is_owner)
        return upper, Span(self.segment, position, self.end, is_owner=False)

    def drop(self) -> Tensor | None:
        """Drop the span when its node leaves the tree; InvariantError for an owner with spans below it.

        Returns [num_slots], int64, the slots of the segment whose owner this was; None otherwise.
        """
        self.segment.num_spans -= 1
        if not self.is_owner:
            return None
        if self.segment.num_spans:
            raise InvariantError(
                f"the owner of the span [{self.start}, {self.end}) was dropped before {self.segment.num_spans} others"
            )
        return self.segment.packed.token_slots


@dataclass(frozen=True)
class View:
    """The tokens ``[start, end)`` of a segment, logical positions."""

    segment: Segment
    start: int
    end: int

    @property
    def is_whole(self) -> bool:
        """Whether the view covers its segment."""
        return (self.start, self.end) == (self.segment.start, self.segment.end)

    @property
    def counts(self) -> tuple[int, ...] | None:
        """Entries of these tokens, of each part, if the host knows how many: those of all live spans."""
        segment = self.segment
        return segment.live_counts if (self.start, self.end) == (segment.start, segment.live_end) else None


@dataclass(frozen=True)
class CopiedEntries:
    """Copies of entries, outside the pool.

    Attributes:
        parts: as in :class:`Packed`.
        order: [num_entries], int16, the keys of the entries' order, part after part; None: unknown.
    """

    parts: tuple[CopiedRows, ...]
    order: Tensor | None

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Of each part the bits of its rows, and how many entries it has."""
        return [(part.bits, part.positions.numel()) for part in self.parts]
