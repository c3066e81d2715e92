"""The spans of tree nodes, and what a path of nodes has of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from kvevict_kernels.span_runs import SpanRuns
from sgl_kvevict.cache.nodes import Node
from sgl_kvevict.cache_report import WIDTHS, CompressedRead
from sgl_kvevict.segments import Segment, Span


class HasSpan(Protocol):
    """What :class:`Spans` reads of a node's record."""

    @property
    def span(self) -> Span | None:
        """The node's part of a segment; None: its tokens are uncompressed."""


class Spans(Mapping[Node, Span]):
    """A read-only view of the spans by node, with functions on paths.

    On every path nodes with spans come first, then uncompressed ones. All spans of a segment lie on consecutive nodes
    of one path. No request reads only some of the spans of an unsplittable segment, and they are dropped together.
    """

    def __init__(self, records: Mapping[Node, HasSpan]) -> None:
        self._records = records

    def __getitem__(self, node: Node) -> Span:
        span = self.at(node)
        if span is None:
            raise KeyError(node)
        return span

    def __contains__(self, node: object) -> bool:
        return self.at(node) is not None  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Node]:
        return (node for node in self._records if self.at(node) is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def at(self, node: Node | None) -> Span | None:
        """A node's part of a segment; None if its tokens are in ordinary slots."""
        return None if node is None or node not in self._records else self._records[node].span

    def compressed_len(self, path: Sequence[Node]) -> int:
        """Number of compressed tokens of a path: where its last span ends."""
        for node in reversed(path):
            if (span := self.at(node)) is not None:
                return span.end
        return 0

    def uncompressed(self, path: Sequence[Node]) -> list[Node]:
        """Nodes of a path that hold no span."""
        return [node for node in path if node not in self]

    def runs(self, path: Sequence[Node]) -> tuple[SpanRuns, ...]:
        """The spans that a request which locks a path reads, root side first."""
        return tuple(runs for node in path if node in self for runs in self[node].runs())

    def compressed_read(self, path: Sequence[Node], num_tokens: int) -> CompressedRead:
        """What a request that locks a path reads of the compressed ones among its first ``num_tokens`` tokens.

        From numbers that the host has. They are those of whole segments, so a request that reads a part of a segment
        reads as much of it as all its readers do on average.
        """
        tokens: Counter[Segment] = Counter()
        for node in path:
            span = self.at(node)
            if span is None or span.start >= num_tokens:
                break
            tokens[span.segment] += min(span.end, num_tokens) - span.start
        entries = dict.fromkeys(WIDTHS, 0.0)
        for segment, num_read in tokens.items():
            part = num_read / (segment.live_end - segment.start) / segment.geometry.num_runs
            for rows, count in zip(segment.packed.parts, segment.live_counts, strict=True):
                entries[rows.bits] += count * part
        compressed = tokens.total()
        if not compressed:
            return CompressedRead()
        return CompressedRead(compressed, tuple(entries[bits] / compressed for bits in WIDTHS))

    def blocks(self, node: Node) -> bool:
        """Whether no request may stop right after a node: it would read only a part of an unsplittable segment."""
        span = self.at(node)
        return span is not None and not span.segment.splittable and span.end < span.segment.end

    def owner_of(self, node: Node) -> Node:
        """Topmost node of the segment of a node with a span."""
        return self.nodes_of(node, self[node].segment)[0]

    def nodes_of(self, lowest: Node, segment: Segment) -> list[Node]:
        """Nodes of a segment, from the owner to ``lowest``."""
        nodes = []
        node: Node | None = lowest
        while node is not None and (span := self.at(node)) is not None and span.segment is segment:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def views_of(self, owner: Node) -> list[Node]:
        """All nodes with spans of the segment that a node owns, root side first."""
        span = self.at(owner)
        assert span is not None
        segment, views = span.segment, [owner]
        while len(views) < segment.num_spans:
            views.append(next(child for child in views[-1].children.values() if self.has_part(child, segment)))
        return views

    def has_part(self, node: Node, segment: Segment) -> bool:
        """Whether a node holds a part of a segment."""
        span = self.at(node)
        return span is not None and span.segment is segment
