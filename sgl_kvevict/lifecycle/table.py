"""The table of all prefixes: one record per node, the queues that index it, and the changes of spans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor

from sgl_kvevict.compression import PromptObservation, ReaderObservation
from sgl_kvevict.config import KVEvictConfig
from sgl_kvevict.errors import InvariantError
from sgl_kvevict.guard import accounting
from sgl_kvevict.lifecycle.eviction import NodeSet
from sgl_kvevict.lifecycle.job import ScoringJob
from sgl_kvevict.lifecycle.listener import CacheListener
from sgl_kvevict.lifecycle.nodes import Node, path_to
from sgl_kvevict.lifecycle.prefix import Change, Pending, PrefixRecord, SegmentFit, State, next_states, state_of
from sgl_kvevict.lifecycle.spans import Spans
from sgl_kvevict.prefix import Segment, SegmentPacker, Span
from sgl_kvevict.prefix.packer import LargestOfRanks

T = TypeVar("T")


@dataclass(frozen=True)
class DropResult:
    """What a node held when it left the tree.

    Attributes:
        span: its span; None: ordinary slots.
        slots: [num_slots], int64, token slots to release; None: the node's ordinary ones.
        owner: node whose segment was repacked; None if none was.
        fit: the fit of its segment, which is given up; None if there was none, or a node above goes on with it.
    """

    span: Span | None = None
    slots: Tensor | None = None
    owner: Node | None = None
    fit: SegmentFit | None = None


class Queue(Generic[T]):
    """Records that have a certain part, oldest first.

    Attributes:
        num_bytes: memory of the parts, as it was told when they were put in.
    """

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
        """Nodes and their parts; the queue may change meanwhile."""
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
        """Set the part of a node's record, which becomes the newest."""
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


class PrefixTable:
    """All that is known of prefixes: the only table keyed by nodes.

    Each change of the tree (split, drop, flush) has one function here, which handles the whole record. Whether a
    node's state allows a change is said by :data:`~sgl_kvevict.lifecycle.prefix.CHANGES`.

    Args:
        packer: repacks segments.
        config: says to which shares segments shrink; None: nothing is ever compressed.

    Attributes:
        spans: the compressed tokens of nodes: a view.
        shrinking: nodes that may shrink when slots are short.
        prompts: what prefills left behind.
        pending: ranges that wait for exact readers.
        votes: what requests have attended to.
        jobs: prefixes that wait for passes, those under way included.
        fits: segments that wait for their fit.
        stale: nodes that must not be matched.
        listener: receives every change of the cache; does nothing unless events or metrics are on.
    """

    def __init__(self, packer: SegmentPacker, config: KVEvictConfig | None) -> None:
        self._packer = packer
        self._config = config
        self._records: dict[Node, PrefixRecord] = {}
        self.listener = CacheListener()
        self.spans = Spans(self._records)
        self.shrinking = NodeSet()
        self.prompts: Queue[PromptObservation] = Queue(self._records, "prompt")
        self.pending: Queue[Pending] = Queue(self._records, "pending")
        self.votes: Queue[ReaderObservation] = Queue(self._records, "vote")
        self.jobs: Queue[ScoringJob] = Queue(self._records, "job")
        self.fits: Queue[SegmentFit] = Queue(self._records, "fit")
        self.stale: Queue[bool] = Queue(self._records, "is_stale")

    @property
    def _queues(self) -> tuple[Queue[Any], ...]:
        return self.prompts, self.pending, self.votes, self.jobs, self.fits, self.stale

    def count_match(self, node: Node) -> int:
        """Count one more prompt that found the prefix; return how many have."""
        record = self._records.setdefault(node, PrefixRecord())
        record.matches += 1
        return record.matches

    def let_shrink(self, node: Node) -> None:
        """A node is an end, or the owner of a segment: it shrinks when slots are short."""
        self._records.setdefault(node, PrefixRecord()).may_shrink = True
        self.shrinking.add(node)

    def keep_size(self, node: Node) -> None:
        """A node does not shrink any more."""
        if node in self.shrinking:
            self._records[node].may_shrink = False
            self.shrinking.discard(node)

    def state(self, node: Node) -> State:
        """What a node holds."""
        return state_of(self.spans.at(node), self._config)

    @property
    def begun_jobs(self) -> list[ScoringJob]:
        """Jobs between two of their passes or layers of their lesson, which hold memory; oldest first."""
        return [job for job in self.jobs.values() if job.observation is not None]

    def is_being_scored(self, node: Node) -> bool:
        """Whether a node belongs to the prefix of a job that has begun."""
        return any(node in path_to(job.node) for job in self.begun_jobs)

    # ---- changes of spans -------------------------------------------------------------------------------------

    @accounting()
    def install(self, nodes: Sequence[Node], segment: Segment) -> None:
        """Give consecutive nodes their spans of a new segment; what waited for their compression is forgotten.

        Args:
            nodes: root side first; those that hold spans hold all spans of one segment, which the new one replaces.
            segment: written for all of them.
        """
        start = segment.start
        for i, node in enumerate(nodes):
            record = self._records.setdefault(node, PrefixRecord())
            allowed = next_states(self.state(node), Change.INSTALL if record.span is None else Change.GROW)
            end = start + len(node.key)
            if record.span is None:
                record.span = Span(segment, start, end, is_owner=i == 0)
            else:
                record.span.move_to(segment)
            self._require(node, allowed)
            self.pending.take(node)
            self.prompts.take(node)
            self.keep_size(node)
            start = end
        if segment.is_generated:
            return
        if self._config is not None and len(self._config.shares) > 1:
            self.let_shrink(nodes[0])
        if not segment.is_ranked:
            for job in self.begun_jobs:
                if job.observation is not None and nodes[-1] in path_to(job.node):
                    job.observation.hand_over(segment)  # its passes go on with the segment's entries

    @accounting()
    def squeeze(self, owner: Node, num_slots: int) -> Tensor:
        """Shrink the segment that a node owns to ``num_slots`` token slots.

        Returns:
            [num_freed], int64, token slots to release.
        """
        allowed = next_states(self.state(owner), Change.SQUEEZE)
        freed = self._packer.squeeze([self.spans[each] for each in self.spans.views_of(owner)], num_slots)
        self._require(owner, allowed)
        return freed

    def _require(self, node: Node, allowed: frozenset[State]) -> None:
        if self.state(node) not in allowed:
            raise InvariantError(f"a change led to the state {self.state(node).value!r}")

    # ---- changes of the tree ----------------------------------------------------------------------------------

    @accounting()
    def split(self, upper: Node, lower: Node) -> Span | None:
        """A node was cut: both halves are views of its segment, and prompts that matched it matched its upper half.

        Jobs, votes, pending ranges and fits belong to the lower half, which ends where the node ended.

        Args:
            upper: the new node.
            lower: the node that was cut.

        Returns:
            The lower half's span; None if the node held none.
        """
        below = self._records.get(lower)
        if below is None:
            return None
        next_states(self.state(lower), Change.SPLIT)
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
        """A leaf left the tree, and its record with it.

        An owner's slots are released. A lower span releases none by itself, so what is still alive of its segment is
        repacked into fewer slots at once. The rest of a segment that cannot be split saves nothing any more, so it is
        dropped next.
        """
        record = self._records.get(node)
        if record is None:
            return DropResult()
        next_states(self.state(node), Change.DROP)
        fit, span = record.fit, record.span
        for queue in self._queues:
            queue.take(node)
        self.keep_size(node)
        del self._records[node]
        if span is None:
            return DropResult()
        above = node.parent
        if fit is not None and above is not None and self.spans.nodes_of(above, span.segment):
            self.fits.put(above, fit)
            fit = None
        slots = span.drop()
        if slots is not None:
            return DropResult(span, slots, fit=fit)
        if not span.segment.splittable:
            span.segment.tokens_per_slot = float("-inf")
            return DropResult(span, span.segment.token_slots[:0], fit=fit)
        assert above is not None
        nodes = self.spans.nodes_of(above, span.segment)
        repacked = self._packer.repack([self.spans[each] for each in nodes], largest)
        return DropResult(span, repacked, nodes[0], fit)

    def clear(self) -> None:
        """The tree was flushed."""
        self._empty(*self._queues)
        self._records.clear()

    def forget(self) -> None:
        """The model has other weights: only spans are kept, and which of them are stale."""
        self._empty(*(queue for queue in self._queues if queue is not self.stale))
        for record in self._records.values():
            record.matches = 0

    def _empty(self, *queues: Queue[Any]) -> None:
        for queue in queues:
            for node, _ in queue:
                queue.take(node)
        for node in list(self.shrinking):
            self.keep_size(node)
