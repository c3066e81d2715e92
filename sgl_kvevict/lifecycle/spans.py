"""The spans that nodes hold, and what they make of a path."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from kvevict_kernels.span_runs import SpanRuns, waterline_of
from sgl_kvevict.lifecycle.nodes import Node
from sgl_kvevict.lifecycle.prefix import PrefixRecord
from sgl_kvevict.prefix import Segment, Span


class Spans(Mapping[Node, Span]):
    """The spans of the table by node, and what they make of a path: a view that changes nothing.

    On every path, nodes with spans come before those without. All spans of a segment lie on consecutive nodes of one
    path. The spans of a segment that cannot be split stand and fall together: no request reads only some of them.

    Args:
        records: of the table.
    """

    def __init__(self, records: Mapping[Node, PrefixRecord]) -> None:
        self._records = records

    def __getitem__(self, node: Node) -> Span:
        span = self.at(node)
        if span is None:
            raise KeyError(node)
        return span

    def __contains__(self, node: object) -> bool:
        record = self._records.get(node)  # type: ignore[call-overload]  # a node, or nothing that the table has
        return record is not None and record.span is not None

    def __iter__(self) -> Iterator[Node]:
        return (node for node, record in self._records.items() if record.span is not None)

    def __len__(self) -> int:
        return sum(record.span is not None for record in self._records.values())

    def at(self, node: Node | None) -> Span | None:
        """The span of a node; None if it holds none."""
        record = None if node is None else self._records.get(node)
        return None if record is None else record.span

    def waterline(self, path: Sequence[Node]) -> int:
        """Tokens of a path that are compressed."""
        return waterline_of(self[node] for node in path if node in self)

    def uncompressed(self, path: Sequence[Node]) -> list[Node]:
        """Nodes of a path that hold no span."""
        return [node for node in path if node not in self]

    def owners(self, path: Sequence[Node]) -> list[Node]:
        """Nodes of a path that own a segment all of whose spans lie on it, root side first."""
        views = Counter(self[node].segment for node in path if node in self)
        owned = [node for node in path if node in self and self[node].is_owner]
        return [node for node in owned if views[self[node].segment] == self[node].segment.num_spans]

    def runs(self, path: Sequence[Node]) -> tuple[SpanRuns, ...]:
        """What a request reads that locks a path: its spans, root side first.

        A segment that grew while a request generated has many views. A path with all of them reads the segment as one,
        unless its last views were dropped: their entries stay until a repack saves a slot.
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

    def blocks(self, node: Node) -> bool:
        """Whether no request may stop right after a node: it would read a part of a segment that cannot be split."""
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
