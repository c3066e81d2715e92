"""Which node holds which span: how spans are installed, cut, dropped and repacked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kvevict_kernels.span_runs import SpanRuns, waterline_of
from sgl_kvevict.guard import accounting
from sgl_kvevict.lifecycle.nodes import Node
from sgl_kvevict.prefix import Segment, SegmentPacker, Span
from sgl_kvevict.prefix.packer import LargestOfRanks


@dataclass(frozen=True)
class Drop:
    """What became of the span of a node that left the tree.

    Attributes:
        span: what the node held.
        slots: [num_slots], int64, token slots that come back.
        owner: node whose segment was repacked; None if none was.
    """

    span: Span
    slots: Tensor
    owner: Node | None = None


class SpanTable(dict[Node, Span]):
    """Spans by node. On every path, nodes with spans come before those without.

    All spans of a segment lie on consecutive nodes of one path. Those of a segment that cannot be split stand and
    fall together: nobody may read some of them only, see :meth:`blocks`.

    Args:
        store: repacks segments.
    """

    def __init__(self, store: SegmentPacker) -> None:
        super().__init__()
        self._store = store

    def waterline(self, path: Sequence[Node]) -> int:
        """Tokens of a path that its spans stand for."""
        return waterline_of(self[node] for node in path if node in self)

    def owners(self, path: Sequence[Node]) -> list[Node]:
        """Nodes of a path that own a segment all of whose spans lie on it, root side first."""
        views = Counter(self[node].segment for node in path if node in self)
        owned = [node for node in path if node in self and self[node].is_owner]
        return [node for node in owned if views[self[node].segment] == self[node].segment.num_spans]

    @accounting()
    def install(self, nodes: Sequence[Node], segment: Segment, start: int) -> None:
        """Give consecutive nodes their spans of a new segment.

        Args:
            nodes: root side first.
            segment: what was written for all of them.
            start: logical position of the first node's first token.
        """
        for i, node in enumerate(nodes):
            end = start + len(node.key)
            self[node] = Span(segment, start, end, is_owner=i == 0)
            start = end

    @accounting()
    def grow(self, nodes: Sequence[Node], segment: Segment) -> None:
        """Give consecutive nodes their spans of a new segment, which takes the place of one that some of them held.

        Args:
            nodes: root side first; those that hold spans hold all of one segment.
            segment: what was written for all of them.
        """
        start = segment.start
        for i, node in enumerate(nodes):
            if node in self:
                self[node].move_to(segment)
            else:
                self[node] = Span(segment, start, start + len(node.key), is_owner=i == 0)
            start += len(node.key)

    def runs(self, path: Sequence[Node]) -> tuple[SpanRuns, ...]:
        """What a request reads that locks a path: its spans, root side first.

        A segment that grew while a request generated has many views; who reads all of them reads the segment. Not so
        where its last views were dropped: their entries stay until that saves a slot.
        """
        spans = [self[node] for node in path if node in self]
        runs = []
        i = 0
        while i < len(spans):
            segment, last = spans[i].segment, i + spans[i].segment.num_spans - 1
            is_whole = segment.is_generated and last < len(spans) and spans[last].end == segment.end
            if is_whole and spans[i].is_owner:
                runs.append(segment.runs())
                i = last
            else:
                runs.append(spans[i].runs())
            i += 1
        return tuple(runs)

    @accounting()
    def split(self, upper: Node, lower: Node) -> Span | None:
        """A node was cut; both parts are views of its segment, nothing is copied.

        Args:
            upper: the new node.
            lower: the node that held the span.

        Returns:
            The lower part's span; None if the node held none.
        """
        span = self.get(lower)
        if span is None:
            return None
        self[upper], self[lower] = span.split(span.start + len(upper.key))
        return self[lower]

    @accounting()
    def drop(self, node: Node, largest: LargestOfRanks) -> Drop | None:
        """A leaf left the tree.

        The owner's slots come back. A lower span gives up none by itself, so what is still alive of its segment is
        moved into fewer slots at once. What is left of a segment that cannot be split is of no use to anybody: it
        saves nothing any more, so it is dropped next.

        Returns:
            None if the node held no span.
        """
        span = self.pop(node, None)
        if span is None:
            return None
        slots = span.drop()
        if slots is not None:
            return Drop(span, slots)
        if not span.segment.splittable:
            span.segment.tokens_per_slot = float("-inf")
            return Drop(span, span.segment.token_slots[:0])
        assert node.parent is not None
        nodes = self._nodes_of_segment(node.parent, span.segment)
        return Drop(span, self._store.repack([self[each] for each in nodes], largest), nodes[0])

    @accounting()
    def squeeze(self, owner: Node, num_slots: int) -> Tensor:
        """Shrink the segment that a node owns to ``num_slots`` token slots.

        Returns:
            [num_freed], int64, token slots that come back.
        """
        return self._store.squeeze([self[each] for each in self._views_of(owner)], num_slots)

    def blocks(self, node: Node) -> bool:
        """Whether a reader may not stop right after a node: it would read a part of what cannot be split."""
        span = self.get(node)
        return span is not None and not span.segment.splittable and span.end < span.segment.end

    def owner_of(self, node: Node) -> Node:
        """Topmost node with a span of the same segment as this node's."""
        return self._nodes_of_segment(node, self[node].segment)[0]

    def ends_of(self, last: Node) -> list[int]:
        """Logical positions at which the views of a segment end, of which a node holds the last one."""
        return [self[node].end for node in self._nodes_of_segment(last, self[last].segment)]

    def last_of(self, owner: Node) -> Node:
        """Last node with a span of the segment that a node owns."""
        return self._views_of(owner)[-1]

    def _nodes_of_segment(self, lowest: Node, segment: Segment) -> list[Node]:
        nodes = []
        node: Node | None = lowest
        while node is not None and (span := self.get(node)) is not None and span.segment is segment:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def _views_of(self, owner: Node) -> list[Node]:
        """All nodes with spans of the segment that a node owns, root side first."""
        segment = self[owner].segment
        views = [owner]
        while len(views) < segment.num_spans:
            views.append(next(child for child in views[-1].children.values() if self._holds(child, segment)))
        return views

    def _holds(self, node: Node, segment: Segment) -> bool:
        span = self.get(node)
        return span is not None and span.segment is segment
