"""Spans (compressed KV of a tree node) and segments (storage of spans).

One compression writes one segment. A span is a view of a segment's tokens ``[start, end)``. All spans of a segment lie
on one path of the tree. The one nearest the root, the *owner*, outlives the others and carries all the segment's token
slots in the accounting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvevict_kernels.cut_runs import cut_runs
from kvevict_kernels.span_runs import SpanRuns
from sgl_kvevict.errors import InvariantError
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.prefix.shadow import Shadow


@dataclass(eq=False)
class EntryAttention:
    """Squared attention of readers to each entry of a segment: ``squares``, [num_entries], float32, summed.

    A rewrite of the segment updates it. ``is_open``: more passes will come; once closed, the sums are unused.
    """

    squares: Tensor
    is_open: bool = True


@dataclass(frozen=True, eq=False)
class Entries:
    """Everything that is known of some entries: tensors of [num_entries], in one order.

    Attributes:
        head_slots: int32, where the entries' rows lie.
        positions: int32, logical positions of their tokens.
        order: int16, as in :class:`Segment`; None: unknown.
        squares: float32, as in :class:`EntryAttention`; None: nobody observes these entries.
    """

    head_slots: Tensor
    positions: Tensor
    order: Tensor | None = None
    squares: Tensor | None = None

    def at(self, numbers: Tensor) -> Entries:
        """The entries with these numbers, [n], int64, in this order."""
        order = None if self.order is None else self.order[numbers]
        squares = None if self.squares is None else self.squares[numbers]
        return Entries(self.head_slots[numbers], self.positions[numbers], order, squares)

    @staticmethod
    def joined(parts: Sequence[Entries]) -> Entries:
        """All entries, one part after the other; what is not known of one part is not known of any."""
        orders = [part.order for part in parts if part.order is not None]
        squares = [part.squares for part in parts if part.squares is not None]
        return Entries(
            torch.cat([part.head_slots for part in parts]),
            torch.cat([part.positions for part in parts]),
            torch.cat(orders) if len(orders) == len(parts) else None,
            torch.cat(squares) if len(squares) == len(parts) else None,
        )


@dataclass(eq=False)
class Segment:
    """The storage of one compressed range, the tokens ``[start, end)`` of a path (logical positions).

    Attributes:
        token_slots: [num_slots], int64, token slots held exclusively.
        num_slots: how many these are (physical length).
        num_tokens: its logical length.
        head_slots: [num_entries], int32, storage of each entry, run after run in (layer, head) order.
        positions: [num_entries], int32, logical position of each entry's token, ascending within a run.
        indptr: [num_layers * num_kv_heads + 1], int32, start of each run.
        splittable: False if an entry may hold information of later tokens (merging in any direction), or if layers with
            sliding windows keep only their last tokens.
        order: [num_entries], int16; fewer slots keep the largest keys (:mod:`sgl_kvevict.policies.order`). None: it is
            unknown, so the segment cannot shrink.
        is_measured: ``order`` comes from measured reader attention, not from predicted scores.
        entry_attention: sums of the passes under way; None or closed without passes.
        policy_state: of the path, for its next compression; opaque here.
        is_generated: holds generated tokens. It grows view by view; a request that reads all views reads them as one,
            see :meth:`Spans.runs`.
        is_joined: it was written from several segments of one prompt; read like a generated one.
        shadow: the draft model's rows in the segment's slots; None: there is no draft model.
        num_live_entries: entries in live spans (``num_spans``): those of tokens before ``live_end``.
    """

    geometry: KVGeometry
    token_slots: Tensor
    head_slots: Tensor
    positions: Tensor
    indptr: Tensor
    start: int
    end: int
    splittable: bool = True
    order: Tensor | None = None
    shadow: Shadow | None = None
    is_measured: bool = False
    entry_attention: EntryAttention | None = None
    policy_state: object | None = None
    is_generated: bool = False
    is_joined: bool = False
    num_spans: int = 0
    _runs: SpanRuns | None = None

    def __post_init__(self) -> None:
        self.num_slots = self.token_slots.numel()
        self.num_tokens = self.end - self.start
        self.tokens_per_slot = self.num_tokens / max(self.num_slots, 1)
        self.num_live_entries, self.live_end = self.num_entries, self.end

    @property
    def num_entries(self) -> int:
        """Entries stored, including dead ones."""
        return self.head_slots.numel()

    @property
    def entries(self) -> Entries:
        """All entries stored, run after run."""
        squares = None if self.entry_attention is None else self.entry_attention.squares
        return Entries(self.head_slots, self.positions, self.order, squares)

    def run_of_entries(self) -> Tensor:
        """[num_entries], int64: each entry's run, ``layer * num_kv_heads + head``."""
        runs = torch.arange(self.geometry.num_runs, device=self.indptr.device)
        return torch.repeat_interleave(runs, self.indptr.diff(), output_size=self.num_entries)

    def runs(self) -> SpanRuns:
        """All entries; always the same object."""
        if self._runs is None:
            starts, lens = self.cut(self.start, self.end)
            self._runs = SpanRuns(self.head_slots, starts, lens, self.num_tokens, self.positions)
        return self._runs

    def cut(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Starts and lengths, [num_layers, num_kv_heads], int32 each, of the runs' parts in ``[start, end)``."""
        if start <= self.start and end >= self.end:
            starts, lens = self.indptr[:-1], self.indptr.diff()
        else:
            starts, lens = cut_runs(self.positions, self.indptr, start, end)
        shape = (self.geometry.num_layers, self.geometry.num_kv_heads)
        return starts.view(shape), lens.view(shape)


class Span:
    """The compressed KV of the tokens ``[start, end)`` of a path, held by one tree node.

    The owner (``is_owner``) is the segment's topmost live span. A rewrite moves entries to another segment;
    then :meth:`runs` returns a new object.
    """

    def __init__(self, segment: Segment, start: int, end: int, *, is_owner: bool) -> None:
        self.segment = segment
        self.start = start
        self.end = end
        self.is_owner = is_owner
        self._runs: SpanRuns | None = None
        self._draft_runs: SpanRuns | None = None
        segment.num_spans += 1

    @property
    def num_tokens(self) -> int:
        """Logical length."""
        return self.end - self.start

    @property
    def charged_slots(self) -> int:
        """Token slots in the accounting: the segment's for the owner, else 0."""
        return self.segment.num_slots if self.is_owner else 0

    def runs(self) -> SpanRuns:
        """The entries of ``[start, end)``.

        Computed at the first call, on the caller's stream, so that a split takes host work only and may happen while a
        forward reads the span.
        """
        segment = self.segment
        if self._runs is None:
            starts, lens = segment.cut(self.start, self.end)
            self._runs = SpanRuns(segment.head_slots, starts, lens, self.num_tokens, segment.positions)
        return self._runs

    def draft_runs(self) -> SpanRuns:
        """Rows of ``[start, end)`` that the draft model reads; the same object until the segment moves."""
        if self._draft_runs is None:
            if self.segment.shadow is None:
                raise InvariantError("a draft model reads a segment that was written without one")
            self._draft_runs = self.segment.shadow.runs(self.start, self.end)
        return self._draft_runs

    def split(self, position: int) -> tuple[Span, Span]:
        """Split at a logical position, without copies; this span must not be used afterwards.

        The first half, nearer the root, inherits ownership. InvariantError if the position is not inside the span, or
        the segment cannot be split.
        """
        if not self.start < position < self.end:
            raise InvariantError(f"split position {position} is not inside the span [{self.start}, {self.end})")
        if not self.segment.splittable:
            raise InvariantError(f"the span [{self.start}, {self.end}) was merged in any direction and has no prefix")
        self.segment.num_spans -= 1
        upper = Span(self.segment, self.start, position, is_owner=self.is_owner)
        return upper, Span(self.segment, position, self.end, is_owner=False)

    def move_to(self, segment: Segment) -> None:
        """Become a view of another segment, to which the entries were rewritten."""
        self.segment.num_spans -= 1
        segment.num_spans += 1
        self.segment = segment
        self._runs = self._draft_runs = None

    def drop(self) -> Tensor | None:
        """Drop the span when its node leaves the tree; InvariantError for an owner with spans below it.

        Returns [num_slots], int64, token slots to release if this was the owner; None otherwise.
        """
        self.segment.num_spans -= 1
        if not self.is_owner:
            return None
        if self.segment.num_spans:
            raise InvariantError(
                f"the owner of the span [{self.start}, {self.end}) was dropped before {self.segment.num_spans} others"
            )
        return self.segment.token_slots


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
    def num_entries(self) -> int | None:
        """Entries of these tokens, if the host knows how many: those of all live spans."""
        segment = self.segment
        return segment.num_live_entries if (self.start, self.end) == (segment.start, segment.live_end) else None


def live_view(spans: Sequence[Span]) -> View:
    """What the spans hold: all live spans of one segment in path order, the owner first, else InvariantError."""
    segment = spans[0].segment
    if any(span.segment is not segment for span in spans) or len(spans) != segment.num_spans:
        raise InvariantError(f"expected all {segment.num_spans} spans of one segment, got {len(spans)}")
    return View(segment, spans[0].start, spans[-1].end)


@dataclass(frozen=True)
class CopiedEntries:
    """Copies of entries, outside the pool; ``positions`` and ``order`` are as in :class:`Segment`.

    ``keep_lens``, [num_layers, num_kv_heads], int32, are entries per run; ``k`` and ``v`` are [num_entries, head_dim],
    in the arena's dtype, on its device.
    """

    keep_lens: Tensor
    positions: Tensor
    k: Tensor
    v: Tensor
    order: Tensor | None
