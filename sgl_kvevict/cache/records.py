"""The table of prefixes: one record per tree node, the segments of nodes, and what changes of the tree do to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sgl_kvevict.cache.nodes import Node, NodeSet
from sgl_kvevict.cache.paths import Spans
from sgl_kvevict.events.totals import Totals
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.guard import accounting
from sgl_kvevict.segments import Observation, Order, Segment, Span


@dataclass(eq=False, slots=True)
class PrefixRecord:
    """Everything known of one node, and of the prefix that ends with it; written only by :class:`PrefixTable`.

    Attributes:
        span: the node's part of a segment, in place or packed; None: it belongs to none.
        retained_until: it counts as used until then (:meth:`CostAwareRecency.retain`); 0: it is not retained.
        num_awaited: samples (``n``) of the prompt that ends with the node which have not begun.
    """

    span: Span | None = None
    retained_until: int = 0
    num_awaited: int = 0


@dataclass(frozen=True)
class DropResult:
    """Contents of a node that left the tree.

    Attributes:
        span: its packed part of a segment; None: it had ordinary slots.
        slots: [num_slots], int64, token slots to release; None: the node's ordinary ones.
        owner: node of a packed segment that lives on without the node's tokens.
    """

    span: Span | None = None
    slots: Tensor | None = None
    owner: Node | None = None


class Prompts:
    """Observations of prompts by which segments in place can be ranked, oldest first.

    ``num_bytes``: their memory. One that is given up is forgotten by all its segments.
    """

    def __init__(self) -> None:
        self._segments: dict[Observation, dict[Segment, None]] = {}
        self._sizes: dict[Observation, int] = {}
        self.num_bytes = 0

    def give(self, segment: Segment, prompt: Observation, num_bytes: int) -> None:
        """Let a segment be ranked by a prompt."""
        self.take(segment)
        segment.prompt = prompt
        self._segments.setdefault(prompt, {})[segment] = None
        self.num_bytes += num_bytes - self._sizes.get(prompt, 0)
        self._sizes[prompt] = num_bytes

    def take(self, segment: Segment) -> None:
        """Let a segment forget its prompt."""
        prompt, segment.prompt = segment.prompt, None
        if prompt is None or prompt not in self._segments:
            return
        del self._segments[prompt][segment]
        if not self._segments[prompt]:
            del self._segments[prompt]
            self.num_bytes -= self._sizes.pop(prompt)

    def copy(self, segment: Segment, other: Segment) -> None:
        """Let a segment be ranked as another one."""
        prompt = other.prompt
        self.take(segment)
        if prompt is not None:
            self.give(segment, prompt, self._sizes[prompt])

    def trim(self, num_bytes: int) -> list[Segment]:
        """Give up the oldest beyond a limit of memory; return the segments that they were of."""
        lost: list[Segment] = []
        for prompt, segments in list(self._segments.items()):
            if self.num_bytes <= num_bytes:
                break
            if self._sizes[prompt]:
                lost += segments
                for segment in list(segments):
                    self.take(segment)
        return lost


class PrefixTable:
    """All that is known of prefixes: the only table keyed by nodes.

    Each change of the tree (split, drop, flush) is one function, which handles the whole record.

    ``shrinks``: packed segments may shrink further.

    Attributes:
        in_place: last node of each segment in place, oldest first.
        packed: owner of each packed segment.
        wanted: segments in place that are to shrink to the budget as soon as they are ranked and all their readers can
            move, with those above them; oldest first.
        shrinking: one node of each segment that may shrink when slots are short: the last one of a segment in place,
            the owner of a packed one.
    """

    def __init__(self, geometry: KVGeometry, *, shrinks: bool) -> None:
        self._geometry = geometry
        self._shrinks = shrinks
        self._records: dict[Node, PrefixRecord] = {}
        self.totals = Totals()
        self.spans = Spans(self._records)
        self.in_place: dict[Segment, Node] = {}
        self.packed: dict[Segment, Node] = {}
        self.wanted: dict[Segment, None] = {}
        self.shrinking = NodeSet()
        self.prompts = Prompts()

    def await_samples(self, node: Node, count: int) -> bool:
        """So many more samples of a prompt are to come; -1: one has begun. Return whether any more is to come."""
        record = self._records.setdefault(node, PrefixRecord())
        record.num_awaited = max(record.num_awaited + count, 0)
        return record.num_awaited > 0

    def stop_awaiting(self, path: Sequence[Node]) -> list[Node]:
        """No more samples of prompts on a path come; return the last nodes of those prompts that had some to come."""
        found = [node for node in path if node in self._records and self._records[node].num_awaited]
        for node in found:
            self._records[node].num_awaited = 0
        return found

    def retain(self, node: Node, until: int) -> None:
        """Let a node count as used until then, or as long as it already does; see :class:`PrefixRecord`."""
        record = self._records.setdefault(node, PrefixRecord())
        record.retained_until = max(record.retained_until, until)

    def retained_until(self, node: Node) -> int:
        """See :class:`PrefixRecord`."""
        record = self._records.get(node)
        return 0 if record is None else record.retained_until

    # ---- segments in place ------------------------------------------------------------------------------------

    def nodes_of(self, segment: Segment) -> list[Node]:
        """Nodes of a segment, root side first."""
        if segment in self.in_place:
            return self.spans.nodes_of(self.in_place[segment], segment)
        return self.spans.views_of(self.packed[segment])

    def chain(self, path: Sequence[Node]) -> list[Segment]:
        """Segments in place of a path, root side first; one of which the path has only the beginning is cut."""
        found: dict[Segment, Node] = {}
        for node in path:
            span = self.spans.of(node)
            if span is not None and not span.is_packed:
                found[span.segment] = node
        return [segment if self.in_place[segment] is last else self._cut_below(last) for segment, last in found.items()]

    def cover(self, nodes: Sequence[Node], start: int) -> Segment:
        """Make a segment in place of consecutive nodes without one; ``start`` is where the first one begins."""
        end = start + sum(len(node.key) for node in nodes)
        segment = Segment(self._geometry, start, end)
        for i, node in enumerate(nodes):
            record = self._records.setdefault(node, PrefixRecord())
            record.span = Span(segment, start, start + len(node.key), is_owner=i == 0)
            start += len(node.key)
        self.in_place[segment] = nodes[-1]
        return segment

    def join(self, segments: Sequence[Segment]) -> Segment:
        """Make one segment in place of consecutive ones. It is not ranked, unless they were ranked together.

        Its prompt, and whether it is wanted, are the last one's.
        """
        if len(segments) == 1:
            return segments[0]
        nodes, last = [node for segment in segments for node in self.nodes_of(segment)], segments[-1]
        joined = Segment(self._geometry, segments[0].start, last.end)
        joined.order = _joined_order(segments)
        self.prompts.copy(joined, last)
        may_shrink = any(self.in_place[segment] in self.shrinking for segment in segments)
        for i, node in enumerate(nodes):
            span = self._records[node].span
            assert span is not None
            span.move_to(joined, is_owner=i == 0)
        is_wanted = last in self.wanted
        for segment in segments:
            self._leave_place(segment)
        self.in_place[joined] = nodes[-1]
        if is_wanted:
            self.wanted[joined] = None
        if may_shrink:
            self.shrinking.add(nodes[-1])
        return joined

    def divide(self, segment: Segment, groups: Sequence[Sequence[Node]]) -> list[Segment]:
        """Cut a segment in place into one for each group of its consecutive nodes."""
        return [*(self._cut_below(nodes[-1]) for nodes in groups[:-1]), segment]

    def _cut_below(self, node: Node) -> Segment:
        """Cut a segment in place below an inner node; return the new segment, which ends there."""
        span = self.spans.of(node)
        assert span is not None
        segment = span.segment
        above = segment.cut_off(span.end)
        nodes = self.spans.nodes_of(node, segment)
        for each in nodes:
            part = self._records[each].span
            assert part is not None
            part.move_to(above, is_owner=part.is_owner)
        below = next(child for child in node.children.values() if self.spans.has_part(child, segment))
        part = self._records[below].span
        assert part is not None
        part.is_owner = True
        above.prompt = None
        self.prompts.copy(above, segment)
        self.in_place[above] = node
        if self.in_place[segment] in self.shrinking:
            self.shrinking.add(node)
        return above

    def _leave_place(self, segment: Segment) -> None:
        """A segment is no longer in place."""
        self.shrinking.discard(self.in_place.pop(segment))
        self.wanted.pop(segment, None)
        self.prompts.take(segment)

    # ---- changes of spans -------------------------------------------------------------------------------------

    def hold(self, nodes: Sequence[Node], segment: Segment) -> None:
        """Make consecutive nodes, root side first, the views of one packed segment, which may have been in place.

        They hold all spans of the segments that it replaces.
        """
        start = segment.start
        for i, node in enumerate(nodes):
            record = self._records.setdefault(node, PrefixRecord())
            end = start + len(node.key)
            if record.span is None:
                record.span = Span(segment, start, end, is_owner=i == 0)
            elif record.span.segment is not segment:
                if record.span.segment in self.in_place:
                    self._leave_place(record.span.segment)
                self.packed.pop(record.span.segment, None)
                record.span.move_to(segment, is_owner=i == 0)
            self.shrinking.discard(node)
            start = end
        if segment in self.in_place:
            self._leave_place(segment)
        self.packed[segment] = nodes[0]
        self.may_shrink(nodes[0])

    def may_shrink(self, owner: Node) -> None:
        """The packed segment of a node may shrink further when slots are short."""
        if self._shrinks:
            self.shrinking.add(owner)

    # ---- changes of the tree ----------------------------------------------------------------------------------

    def split(self, upper: Node, lower: Node) -> None:
        """Divide the record of a node that was cut, ``lower``; ``upper`` is the new node.

        A segment in place is cut, too.
        """
        below = self._records.get(lower)
        if below is None:
            return
        self._divide(below, upper, lower)
        if below.span is not None and below.span.is_packed:
            self.totals.splits += 1

    @accounting()
    def _divide(self, below: PrefixRecord, upper: Node, lower: Node) -> None:
        above = self._records[upper] = PrefixRecord(retained_until=below.retained_until)
        if below.span is not None:
            above.span, below.span = below.span.split(below.span.start + len(upper.key))
            if not below.span.is_packed:
                self._cut_below(upper)
            elif above.span.is_owner:
                self.packed[above.span.segment] = upper
                if lower in self.shrinking:
                    self.shrinking.discard(lower)
                    self.shrinking.add(upper)

    @accounting()
    def drop(self, node: Node) -> DropResult:
        """Remove the record of a leaf that left the tree.

        An owner's slots are released. A lower span releases none by itself: the rest of its segment is packed into
        fewer slots next. The rest of an unsplittable segment saves nothing any more, so it is dropped next. A segment
        in place ends before the node.
        """
        record = self._records.get(node)
        if record is None:
            return DropResult()
        span, above = record.span, node.parent
        assert above is not None
        may_shrink = node in self.shrinking
        self.shrinking.discard(node)
        del self._records[node]
        if span is None:
            return DropResult()
        segment, slots = span.segment, span.drop()
        if not span.is_packed:
            self._drop_in_place(node, span, may_shrink=may_shrink)
            return DropResult()
        if slots is not None:
            del self.packed[segment]
            return DropResult(span, slots)
        if not segment.splittable:
            segment.is_rest, segment.order = True, None  # a resize would make it whole, so that prompts find the rest
            return DropResult(span, segment.storage.token_slots[:0])
        return DropResult(span, segment.storage.token_slots[:0], self.spans.nodes_of(above, segment)[0])

    def _drop_in_place(self, node: Node, span: Span, *, may_shrink: bool) -> None:
        segment = span.segment
        if span.is_owner:
            self._leave_place(segment)
            return
        assert node.parent is not None
        segment.end_at(span.start)
        self.in_place[segment] = node.parent
        if may_shrink:
            self.shrinking.add(node.parent)

    def clear(self) -> None:
        """Remove all records: the tree was flushed."""
        self.forget()
        self._records.clear()
        self.packed.clear()
        for node in list(self.shrinking):
            self.shrinking.discard(node)

    def forget(self) -> None:
        """Remove segments in place, and counts of samples to come: the weights have changed."""
        for segment in list(self.in_place):
            for node in self.nodes_of(segment):
                self._records[node].span = None
            self._leave_place(segment)
        for record in self._records.values():
            record.num_awaited = 0


def _joined_order(segments: Sequence[Segment]) -> Order | None:
    """The order of consecutive segments in place that were ranked together; None if they were not."""
    orders = [segment.order for segment in segments if segment.order is not None]
    if len(orders) < len(segments) or any(one.ranking is not orders[0].ranking for one in orders):
        return None
    return replace(orders[0], launched=lambda: torch.cat([order.launched() for order in orders], dim=-1))
