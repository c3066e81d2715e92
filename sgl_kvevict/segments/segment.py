"""Segments (ranges of one path that are compressed as a unit) and spans (the parts of segments that nodes hold).

A segment has the best entries of its tokens, in token slots of its own, in rows of one width. Where that is 4 bits, the
first tokens of a path, its *sinks*, keep the slots and the rows that they had. Other entries are numbered run after
run, ascending by position; everything that is known of each (its order) travels by this number.

A span is a view of a segment's tokens ``[start, end)``, held by one tree node. All spans of a segment lie on
consecutive nodes of one path. The one nearest the root, the *owner*, outlives the others and carries all the token
slots of the segment in the accounting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kvevict_kernels.cut_runs import cut_runs
from kvevict_kernels.span_runs import SpanRuns
from sgl_kvevict.copies import EvictedPart
from sgl_kvevict.errors import InvariantError
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.ragged import run_entries, runs_of
from sgl_kvevict.segments.arena_rows import entries_of_tokens
from sgl_kvevict.segments.shadow import Shadow


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
        # Lazily: cutting the keys now would wait for a ranking that may still run.
        return replace(self, launched=lambda: launched()[..., first:last], start=start, end=end)


@dataclass(frozen=True, eq=False)
class Rows:
    """Where entries of a segment lie, in rows of one width.

    A row of ``bits`` has the number ``head_slot * ROWS_PER_SLOT[bits] + part``; of 16 bits that of its head slot.

    Attributes:
        bits: of a number of a row: 16 (as the pool stores it) or 4 (:mod:`kvevict_kernels.row_codec`).
        rows: [num_entries], int32, run after run in (layer, head) order.
        positions: [num_entries], int32, logical position of each entry's token, ascending within a run.
        indptr: [num_layers * num_kv_heads + 1], int32, start of each run.
        keys: [num_entries], int16, as in :class:`Order`; None: unknown.
    """

    bits: int
    rows: Tensor
    positions: Tensor
    indptr: Tensor
    keys: Tensor | None

    @property
    def num_entries(self) -> int:
        """Entries stored, including those of tokens whose nodes are gone."""
        return self.rows.numel()

    @staticmethod
    def joined(some: Sequence[Rows]) -> Rows:
        """Different entries of one width, all of which have keys; none is moved."""
        known, widths = [each.keys for each in some if each.keys is not None], {each.bits for each in some}
        if len(widths) > 1 or len(known) < len(some):
            raise InvariantError(f"entries with rows of {sorted(widths)} bits, or without an order, become one")
        rows, positions = torch.cat([each.rows for each in some]), torch.cat([each.positions for each in some])
        runs = torch.cat([runs_of(each.indptr.diff(), each.num_entries) for each in some])
        # Run and position in one int64: one sort orders them all.
        numbers = (runs << 32 | positions).argsort()
        indptr = torch.stack([each.indptr for each in some]).sum(0, dtype=torch.int32)
        return Rows(some[0].bits, rows[numbers], positions[numbers], indptr, torch.cat(known)[numbers])


@dataclass(frozen=True, eq=False)
class Packed:
    """Storage of a segment.

    Attributes:
        token_slots: [num_slots], int64, token slots held exclusively; first those of the sinks, in token order.
        rows: the entries of all tokens behind the sinks.
        num_sinks: the first tokens of the segment that have all their entries where they lay before; 0 where
            ``rows`` have always 16 bits.
        shadow: the draft model's rows in the slots; None: there is no draft model.
    """

    token_slots: Tensor
    rows: Rows
    num_sinks: int = 0
    shadow: Shadow | None = None


@dataclass(eq=False)
class Segment:
    """The tokens ``[start, end)`` of a path (logical positions), which are compressed as a unit.

    It is the same object for life: a resize, or growth, replaces ``packed``.

    Attributes:
        packed: where its entries lie.
        splittable: False if layers with sliding windows keep only their last tokens.
        is_rest: the end of an unsplittable segment was dropped; the rest is never found again.
        num_spans: nodes that hold a part of it.
        live_end: logical position after its last token that a node still holds.
        live_count: those of ``packed.rows`` that are of tokens before ``live_end``.
        evicted: parts of what resizes evicted, lost or not, the first one first; entries of live tokens count.
    """

    geometry: KVGeometry
    start: int
    end: int
    packed: Packed
    splittable: bool = True
    is_rest: bool = False
    num_spans: int = 0
    live_end: int = field(init=False)
    live_count: int = field(init=False)
    evicted: list[EvictedPart] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pack(self.packed, self.end)

    @property
    def num_tokens(self) -> int:
        """Logical length."""
        return self.end - self.start

    @property
    def num_slots(self) -> int:
        """Token slots that it holds."""
        return self.packed.token_slots.numel()

    @property
    def keys(self) -> Tensor | None:
        """Those of ``packed.rows``; None: it cannot shrink.

        The rest of an unsplittable segment would become whole by that, so that prompts find it.
        """
        return None if self.is_rest else self.packed.rows.keys

    @property
    def sink_end(self) -> int:
        """Logical position after its last sink; its first one, if it has none."""
        return self.start + self.packed.num_sinks

    @property
    def num_entries(self) -> int:
        """Entries stored, including those of tokens whose nodes are gone."""
        return self.packed.num_sinks * self.geometry.num_runs + self.packed.rows.num_entries

    @property
    def num_live_entries(self) -> int:
        """Entries of tokens that a node still holds."""
        return sum(self.entries_by_bits.values())

    @property
    def entries_by_bits(self) -> dict[int, int]:
        """Entries of tokens that a node still holds, by the bits of their rows; without widths that no entry has."""
        entries = {16: (min(self.sink_end, self.live_end) - self.start) * self.geometry.num_runs}
        bits = self.packed.rows.bits
        entries[bits] = entries.get(bits, 0) + self.live_count
        return {bits: count for bits, count in entries.items() if count}

    @property
    def tokens_per_slot(self) -> float:
        """Tokens of prefill that each of its slots saves."""
        # It saves nothing any more, so it goes before everything else.
        return float("-inf") if self.is_rest else self.num_tokens / max(self.num_slots, 1)

    @property
    def live_view(self) -> View:
        """All that nodes still hold of it."""
        return View(self, self.start, self.live_end)

    def pack(self, packed: Packed, end: int) -> None:
        """Replace the storage by one of the tokens before ``end``."""
        self.packed, self.end = packed, end
        # A rewrite leaves out entries of tokens that no node holds.
        self.live_end, self.live_count = end, packed.rows.num_entries

    def grow(self, packed: Packed) -> None:
        """Replace the storage by one with further entries of tokens that a node still holds."""
        self.live_count += packed.rows.num_entries - self.packed.rows.num_entries
        self.packed = packed

    def runs_of(self, start: int, end: int) -> tuple[SpanRuns, ...]:
        """The entries of tokens ``[start, end)``: of sinks, then of the others; of either only if they have some."""
        between = min(max(start, self.sink_end), end)
        shape = (self.geometry.num_layers, self.geometry.num_kv_heads)
        runs = []
        if start < between:
            slots = self.packed.token_slots[start - self.start : between - self.start]
            found, positions, indptr = entries_of_tokens(self.geometry, slots, start)
            starts, lens = indptr[:-1].view(shape), indptr.diff().view(shape)
            runs.append(SpanRuns(found, starts, lens, between - start, positions))
        if between < end:
            rows, (starts, lens) = self.packed.rows, self.cut(between, end)
            cut = starts.view(shape), lens.view(shape)
            runs.append(SpanRuns(rows.rows, *cut, end - between, rows.positions, rows.bits))
        return tuple(runs)

    def cut(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Starts and lengths, [num_runs], int32 each, of the runs of ``packed.rows`` in ``[start, end)``."""
        rows = self.packed.rows
        if start <= self.sink_end and end >= self.end:
            return rows.indptr[:-1], rows.indptr.diff()
        return cut_runs(rows.positions, rows.indptr, start, end)


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
        """The entries of ``[start, end)``: :meth:`Segment.runs_of`.

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
        # Compared by identity: a resize replaces the storage, and does not know the spans.
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
        # The upper half is the owner: lower nodes are dropped before it.
        upper = Span(self.segment, self.start, position, is_owner=self.is_owner)
        return upper, Span(self.segment, position, self.end, is_owner=False)

    def drop(self) -> None:
        """Drop the span when its node leaves the tree; InvariantError for an owner with spans below it."""
        self.segment.num_spans -= 1
        if self.is_owner and self.segment.num_spans:
            raise InvariantError(
                f"the owner of the span [{self.start}, {self.end}) was dropped before {self.segment.num_spans} others"
            )


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
    def num_sinks(self) -> int:
        """Sinks among these tokens, its first ones."""
        return max(min(self.segment.sink_end, self.end) - self.start, 0)

    @property
    def count(self) -> int | None:
        """Entries of the other tokens, if the host knows how many: those of all live spans."""
        segment = self.segment
        return segment.live_count if (self.start, self.end) == (segment.start, segment.live_end) else None


def kept_share(span: Span, num_bins: int) -> Tensor:
    """[num_layers * num_kv_heads, num_bins], float32: kept share of the tokens of each bin of a live span.

    Token ``t`` is in bin ``t * num_bins // num_tokens``; there are at most as many bins as tokens.
    """
    num_runs, kept = span.segment.geometry.num_runs, torch.zeros(0)
    for runs in span.runs():
        lens = runs.lens.flatten().long()
        run_of_entry = torch.repeat_interleave(lens)
        tokens = runs.positions[run_entries(runs.starts, lens, len(run_of_entry))].long() - span.start
        cells = run_of_entry * num_bins + tokens * num_bins // span.num_tokens
        counts = torch.bincount(cells, minlength=num_runs * num_bins).view(num_runs, num_bins)
        kept = counts if not kept.numel() else kept + counts
    bin_of_token = torch.arange(span.num_tokens, device=kept.device) * num_bins // span.num_tokens
    return kept / torch.bincount(bin_of_token, minlength=num_bins).float()


def entries_by_head(span: Span) -> dict[int, Tensor]:
    """Entries of a live span that each (layer, KV head) stores, by the bits of their rows.

    The values are [num_layers * num_kv_heads], int32.
    """
    counts: dict[int, Tensor] = {}
    for runs in span.runs():  # sinks, then the others
        lens = runs.lens.flatten()
        counts[runs.bits] = counts[runs.bits] + lens if runs.bits in counts else lens
    return counts
