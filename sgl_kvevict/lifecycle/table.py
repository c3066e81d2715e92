"""The table of prefixes: one record per tree node, its states and changes, and the spans of nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum, auto
from typing import Any, Generic, TypeVar

from torch import Tensor

from kvevict_kernels.span_runs import SpanRuns
from sgl_kvevict.compression import PromptObservation
from sgl_kvevict.config import KVEvictConfig
from sgl_kvevict.errors import InvariantError
from sgl_kvevict.guard import accounting
from sgl_kvevict.lifecycle.job import ScoringJob
from sgl_kvevict.lifecycle.listener import CacheListener
from sgl_kvevict.lifecycle.nodes import Node, NodeSet, path_to
from sgl_kvevict.lifecycle.pending import Pending
from sgl_kvevict.lifecycle.ports import LargestOfRanks
from sgl_kvevict.prefix import Segment, SegmentPacker, Sources, Span, live_view

T = TypeVar("T")


class State(StrEnum):
    """State of a node's tokens, from most to fewest entries."""

    FULL = "full"
    """Its ordinary token slots."""
    LIGHT = "light"
    """A span of a segment above the budget."""
    COMPRESSED = "compressed"
    """A span of a segment at the budget; every span if ``shares`` is empty."""
    SQUEEZED = "squeezed"
    """A span of a segment below the budget."""


class Change(StrEnum):
    """A change of a node's tokens."""

    INSTALL = auto()
    """Its slots are replaced by a span of a new segment."""
    GROW = auto()
    """Its segment is replaced by one that also holds newly generated tokens, or the segments beside it."""
    SQUEEZE = auto()
    """Its segment gives up entries, without any forward."""
    SPLIT = auto()
    """It is cut; both halves keep the state."""
    DROP = auto()
    """It leaves the tree."""


_SPANS = frozenset({State.LIGHT, State.COMPRESSED, State.SQUEEZED})
CHANGES: Mapping[Change, frozenset[State]] = {
    Change.INSTALL: frozenset({State.FULL}),
    Change.GROW: _SPANS,
    Change.SQUEEZE: _SPANS,
    Change.SPLIT: frozenset(State),
    Change.DROP: frozenset(State),
}
"""States that allow a change; others refuse it. None leads back to FULL."""


def require(state: State, change: Change) -> None:
    """Check that a state allows a change.

    Raises:
        InvariantError: it refuses the change; going on would leak slots or leave stale KV.
    """
    if state not in CHANGES[change]:
        raise InvariantError(f"the change {change.name} of a node whose state is {state.value!r}")


@dataclass(eq=False, slots=True)
class PrefixRecord:
    """Everything known of one node, and of the prefix that ends with it; written only by :class:`PrefixTable`.

    Attributes:
        span: the node's compressed tokens; None: they are uncompressed.
        matches: how many prompts have found the prefix.
        may_shrink: it shrinks when slots are short: an *end* of an uncompressed range, or the owner of a segment.
        is_stale: it was compressed with other weights, and must not be matched.
        prompt: observation of a prompt's prefill, for the uncompressed range that ends here.
        pending: a range that ends here, and waits for exact readers or for the choice of its entries.
        job: its scoring passes, waiting or under way.
    """

    span: Span | None = None
    matches: int = 0
    may_shrink: bool = False
    is_stale: bool = False
    prompt: PromptObservation | None = None
    pending: Pending | None = None
    job: ScoringJob | None = None


def state_of(span: Span | None, config: KVEvictConfig | None) -> State:
    """Return the state of a node with this span (None: uncompressed)."""
    if span is None:
        return State.FULL
    if config is None or not config.shares:
        return State.COMPRESSED
    segment = span.segment
    excess = segment.num_slots - config.slots_at(float(config.budget), segment.num_tokens, segment.start)
    if excess == 0:
        return State.COMPRESSED
    return State.LIGHT if excess > 0 else State.SQUEEZED


@dataclass(frozen=True)
class DropResult:
    """Contents of a node that left the tree.

    Attributes:
        slots: [num_slots], int64, token slots to release; None: the node's ordinary ones.
        owner: node whose segment was repacked, if one was.
    """

    span: Span | None = None
    slots: Tensor | None = None
    owner: Node | None = None


class Queue(Generic[T]):
    """Records that have a certain part, oldest first; ``num_bytes``: memory of the parts, as passed to :meth:`put`."""

    def __init__(self, records: dict[Node, PrefixRecord], part: str) -> None:
        self._records = records
        self._part = part
        self._sizes: dict[Node, int] = {}
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, node: object) -> bool:
        return node in self._sizes

    def __iter__(self) -> Iterator[tuple[Node, T]]:
        """Nodes and their parts; the queue may change during the iteration."""
        return iter([(node, getattr(self._records[node], self._part)) for node in self._sizes])

    def values(self) -> list[T]:
        """The parts, oldest first."""
        return [value for _, value in self]

    def oldest(self) -> tuple[Node, T] | None:
        """The oldest node and its part."""
        node = next(iter(self._sizes), None)
        return None if node is None else (node, getattr(self._records[node], self._part))

    def get(self, node: Node) -> T | None:
        """The part of a node's record; None if it has none."""
        return getattr(self._records[node], self._part) if node in self._sizes else None

    def put(self, node: Node, value: T, num_bytes: int = 0) -> None:
        """Set the part of a node's record, as the newest."""
        self.take(node)
        setattr(self._records.setdefault(node, PrefixRecord()), self._part, value)
        self._sizes[node] = num_bytes
        self.num_bytes += num_bytes

    def take(self, node: Node) -> T | None:
        """Remove and return the part of a node's record; None if it has none."""
        if node not in self._sizes:
            return None
        self.num_bytes -= self._sizes.pop(node)
        record = self._records[node]
        value: T = getattr(record, self._part)
        setattr(record, self._part, PrefixRecord.__dataclass_fields__[self._part].default)
        return value


class Spans(Mapping[Node, Span]):
    """A read-only view of the table's spans by node, with functions on paths.

    On every path, nodes with spans come before those without. All spans of a segment lie on consecutive nodes of one
    path. The spans of an unsplittable segment stand and fall together: no request reads only some of them.
    """

    def __init__(self, records: Mapping[Node, PrefixRecord]) -> None:
        self._records = records

    def __getitem__(self, node: Node) -> Span:
        span = self._records[node].span
        if span is None:
            raise KeyError(node)
        return span

    def __contains__(self, node: object) -> bool:
        return node in self._records and self._records[node].span is not None  # type: ignore[index]

    def __iter__(self) -> Iterator[Node]:
        return (node for node, record in self._records.items() if record.span is not None)

    def __len__(self) -> int:
        return sum(record.span is not None for record in self._records.values())

    def at(self, node: Node | None) -> Span | None:
        """The span of a node; None if it holds none."""
        return None if node is None or node not in self._records else self._records[node].span

    def waterline(self, path: Sequence[Node]) -> int:
        """Number of compressed tokens of a path: where its last span ends."""
        for node in reversed(path):
            if (span := self.at(node)) is not None:
                return span.end
        return 0

    def uncompressed(self, path: Sequence[Node]) -> list[Node]:
        """Nodes of a path that hold no span."""
        return [node for node in path if node not in self]

    def owners(self, path: Sequence[Node]) -> list[Node]:
        """Nodes of a path that own a segment whose spans all lie on it, root side first."""
        views = Counter(self[node].segment for node in path if node in self)
        owned = [node for node in path if node in self and self[node].is_owner]
        return [node for node in owned if views[self[node].segment] == self[node].segment.num_spans]

    def runs(self, path: Sequence[Node]) -> tuple[SpanRuns, ...]:
        """The spans that a request which locks a path reads, root side first.

        A segment that grew while a request generated, or was joined, has many spans. A path with all reads it as one,
        unless its last spans were dropped: their entries stay until a repack saves a slot.
        """
        spans = [self[node] for node in path if node in self]
        runs = []
        i = 0
        while i < len(spans):
            segment, last = spans[i].segment, i + spans[i].segment.num_spans - 1
            is_one = segment.is_generated or segment.is_joined
            is_whole = is_one and last < len(spans) and spans[last].segment is segment
            if is_whole and spans[i].is_owner and spans[last].end == segment.end:
                runs.append(segment.runs())
                i = last
            else:
                runs.append(spans[i].runs())
            i += 1
        return tuple(runs)

    def blocks(self, node: Node) -> bool:
        """Whether no request may stop right after a node: it would read only a part of an unsplittable segment."""
        span = self.at(node)
        return span is not None and not span.segment.splittable and span.end < span.segment.end

    def owner_of(self, node: Node) -> Node:
        """Topmost node with a span of the same segment as this node's."""
        return self.nodes_of(node, self[node].segment)[0]

    def last_of(self, owner: Node) -> Node:
        """Last node with a span of the segment that a node owns."""
        return self.views_of(owner)[-1]

    def nodes_of(self, lowest: Node, segment: Segment) -> list[Node]:
        """Nodes with spans of a segment, from the owner to ``lowest``."""
        nodes = []
        node: Node | None = lowest
        while node is not None and (span := self.at(node)) is not None and span.segment is segment:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def views_of(self, owner: Node) -> list[Node]:
        """All nodes with spans of the segment that a node owns, root side first."""
        segment = self[owner].segment
        views = [owner]
        while len(views) < segment.num_spans:
            views.append(next(child for child in views[-1].children.values() if self._holds(child, segment)))
        return views

    def _holds(self, node: Node, segment: Segment) -> bool:
        span = self.at(node)
        return span is not None and span.segment is segment


class PrefixTable:
    """All that is known of prefixes: the only table keyed by nodes.

    Each change of the tree (split, drop, flush) is one function, which handles the whole record; :data:`CHANGES` says
    which states allow a change. With ``config`` None nothing is ever compressed.

    ``shrinking`` holds nodes that may shrink when slots are short; the queues are explained in :class:`PrefixRecord`.
    """

    def __init__(self, packer: SegmentPacker, config: KVEvictConfig | None, listener: CacheListener) -> None:
        self._packer = packer
        self._config = config
        self._records: dict[Node, PrefixRecord] = {}
        self.listener = listener
        self.spans = Spans(self._records)
        self.shrinking = NodeSet()
        self.prompts: Queue[PromptObservation] = Queue(self._records, "prompt")
        self.pending: Queue[Pending] = Queue(self._records, "pending")
        self.jobs: Queue[ScoringJob] = Queue(self._records, "job")
        self.stale: Queue[bool] = Queue(self._records, "is_stale")

    @property
    def _queues(self) -> tuple[Queue[Any], ...]:
        return self.prompts, self.pending, self.jobs, self.stale

    def count_match(self, node: Node) -> int:
        """Count one more prompt that found the prefix; return the new count."""
        record = self._records.setdefault(node, PrefixRecord())
        record.matches += 1
        return record.matches

    def let_shrink(self, node: Node) -> None:
        """Let a node, an end or the owner of a segment, shrink when slots are short."""
        self._records.setdefault(node, PrefixRecord()).may_shrink = True
        self.shrinking.add(node)

    def keep_size(self, node: Node) -> None:
        """Exclude a node from shrinking."""
        if node in self.shrinking:
            self._records[node].may_shrink = False
            self.shrinking.discard(node)

    def state(self, node: Node) -> State:
        """State of a node."""
        return state_of(self.spans.at(node), self._config)

    @property
    def begun_jobs(self) -> list[ScoringJob]:
        """Jobs that have begun, and so hold memory; oldest first."""
        return [job for job in self.jobs.values() if job.observation is not None]

    def is_being_scored(self, node: Node) -> bool:
        """Whether a node is part of the prefix of a begun job."""
        return any(node in path_to(job.node) for job in self.begun_jobs)

    # ---- changes of spans -------------------------------------------------------------------------------------

    def install(self, nodes: Sequence[Node], segment: Segment) -> None:
        """Give consecutive nodes their spans of a new segment, and remove their pending ranges and prompts.

        ``nodes`` are root side first; those with spans hold all spans of the segments that the new one replaces.
        """
        start = segment.start
        for i, node in enumerate(nodes):
            record = self._records.setdefault(node, PrefixRecord())
            require(self.state(node), Change.INSTALL if record.span is None else Change.GROW)
            end = start + len(node.key)
            if record.span is None:
                record.span = Span(segment, start, end, is_owner=i == 0)
            else:
                record.span.move_to(segment)
                record.span.is_owner = i == 0
            self.pending.take(node)
            self.prompts.take(node)
            self.keep_size(node)
            start = end
        if segment.is_generated:
            return
        if self._config is not None and len(self._config.shares) > 1:
            self.let_shrink(nodes[0])
        if not segment.is_measured:
            for _, job in self.jobs:
                if job.observation is not None and nodes[-1] in path_to(job.node):
                    job.observation.hand_over(segment)  # further passes add to the segment's entries

    @accounting()
    def squeeze(self, owner: Node, num_slots: int) -> Tensor:
        """Evict the last entries in order, until a segment has ``num_slots`` token slots, without a host sync.

        Returns the token slots to release, [num_freed], int64.
        """
        require(self.state(owner), Change.SQUEEZE)
        spans = [self.spans[each] for each in self.spans.views_of(owner)]
        sources = Sources(self._packer.geometry, [live_view(spans)])
        return self._rewrite(spans, sources.best(num_slots), num_slots)

    def _repack(self, spans: Sequence[Span], largest: LargestOfRanks) -> Tensor:
        """Move the entries of live spans of one segment into as few slots as they take; return those to release.

        Tensor-parallel ranks keep different entries and may need different numbers of slots. They repack the same spans
        at the same time, and all take the largest number (``largest``).
        """
        view, segment = live_view(spans), spans[0].segment
        # sync: only when a node below another view of its segment is dropped
        sources = Sources(self._packer.geometry, [view])
        segment.num_live_entries, segment.live_end = sources.selection.num_entries, view.end
        num_slots = largest(sources.fewest_slots, view.start, view.end, segment.num_slots)
        if num_slots == segment.num_slots:
            return segment.token_slots[:0]
        return self._rewrite(spans, sources, num_slots)

    def _rewrite(self, spans: Sequence[Span], sources: Sources, num_slots: int) -> Tensor:
        """Write the kept entries of all live spans of a segment anew; return token slots to release."""
        segment, freed = self._packer.rewrite(sources, num_slots, bits=16)
        for span in spans:
            span.move_to(segment)
        return freed

    # ---- changes of the tree ----------------------------------------------------------------------------------

    @accounting()
    def split(self, upper: Node, lower: Node) -> Span | None:
        """Divide the record of a node that was cut, ``lower``; ``upper`` is the new node. Return the span of ``lower``.

        Prompts that matched the node also matched its upper half. Jobs and pending ranges belong to the
        lower half, which ends where the node ended.
        """
        below = self._records.get(lower)
        if below is None:
            return None
        require(self.state(lower), Change.SPLIT)
        above = self._records[upper] = PrefixRecord(matches=below.matches)
        if below.span is not None:
            above.span, below.span = below.span.split(below.span.start + len(upper.key))
        if lower in self.stale:
            self.stale.put(upper, value=True)
        if below.may_shrink:
            self.let_shrink(upper)
            if below.span is not None:
                self.keep_size(lower)  # the owner shrinks
            elif below.prompt is not None:
                self.prompts.put(upper, below.prompt, below.prompt.num_bytes)
        return below.span

    @accounting()
    def drop(self, node: Node, largest: LargestOfRanks) -> DropResult:
        """Remove the record of a leaf that left the tree.

        An owner's slots are released. A lower span releases none by itself, so the live entries of its segment are
        repacked into fewer slots at once. The rest of an unsplittable segment saves nothing any more, so it is dropped
        next.
        """
        record = self._records.get(node)
        if record is None:
            return DropResult()
        require(self.state(node), Change.DROP)
        span = record.span
        for queue in self._queues:
            queue.take(node)
        self.keep_size(node)
        del self._records[node]
        if span is None:
            return DropResult()
        slots = span.drop()
        if slots is not None:
            return DropResult(span, slots)
        if not span.segment.splittable:
            span.segment.tokens_per_slot = float("-inf")
            span.segment.order = None  # squeezed, it would be a segment of the tokens that are left, and found
            return DropResult(span, span.segment.token_slots[:0])
        assert node.parent is not None
        nodes = self.spans.nodes_of(node.parent, span.segment)
        repacked = self._repack([self.spans[each] for each in nodes], largest)
        return DropResult(span, repacked, nodes[0])

    def clear(self) -> None:
        """Remove all records: the tree was flushed."""
        self._empty(*self._queues)
        self._records.clear()

    def forget(self) -> None:
        """Remove everything but spans and stale marks: the weights have changed."""
        self._empty(*(queue for queue in self._queues if queue is not self.stale))
        for record in self._records.values():
            record.matches = 0

    def _empty(self, *queues: Queue[Any]) -> None:
        for queue in queues:
            for node, _ in queue:
                queue.take(node)
        for node in list(self.shrinking):
            self.keep_size(node)
