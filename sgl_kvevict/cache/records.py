"""The table of prefixes: what is known of tree nodes, their segments, and what changes of the tree do to them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kvevict_kernels.row_sizes import WIDTHS
from kvevict_kernels.span_runs import SpanRuns
from sgl_kvevict.cache.nodes import Node, NodeSet, length_of
from sgl_kvevict.cache_report import CompressedRead
from sgl_kvevict.events.totals import Totals
from sgl_kvevict.guard import accounting
from sgl_kvevict.segments.prompt_observation import Observation
from sgl_kvevict.segments.segment import Order, Segment, Span


class Spans(dict[Node, Span]):
    """The spans by node, with functions on paths; written only by :class:`PrefixTable`.

    On every path nodes with spans come first, then uncompressed ones. All spans of a segment lie on consecutive nodes
    of one path. No request reads only some of the spans of an unsplittable segment, and they are dropped together.
    """

    def compressed_len(self, path: Sequence[Node]) -> int:
        """Number of compressed tokens of a path: where its last span ends."""
        for node in reversed(path):
            if (span := self.get(node)) is not None:
                return span.end
        return 0

    def open_part(self, last: Node) -> tuple[list[Node], int, int]:
        """Nodes without spans at the end of the path to ``last``, root side first, and their bounds (logical)."""
        nodes, node, span = [], last, self.get(last)
        while span is None and (above := node.parent) is not None:
            nodes.append(node)
            node, span = above, self.get(above)
        nodes.reverse()
        start = 0 if span is None else span.end
        return nodes, start, start + length_of(nodes)

    def uncompressed(self, path: Sequence[Node]) -> list[Node]:
        """Nodes of a path that hold no span."""
        return [node for node in path if node not in self]

    def first_uncompressed(self, last: Node, beside: Collection[Node] = ()) -> Node:
        """The first node without a span, and not ``beside``, on the path to such a node."""
        while (above := last.parent) and above.parent and above not in beside and self.get(above) is None:
            last = above
        return last

    def runs(self, path: Sequence[Node]) -> tuple[SpanRuns, ...]:
        """The spans that a request which locks a path reads, root side first."""
        return tuple(runs for node in path if node in self for runs in self[node].runs())

    def compressed_read(self, path: Sequence[Node], num_tokens: int) -> CompressedRead:
        """What a request that locks a path reads of the compressed ones among its first ``num_tokens`` tokens.

        From numbers that the host has. They are those of whole segments, so a request that reads a part of a segment
        reads as much of it as all its readers do on average.
        """
        compressed, shares = 0, dict.fromkeys(WIDTHS, 0.0)
        for node in path:
            span = self.get(node)
            if span is None or span.start >= num_tokens:
                break
            segment, num_read = span.segment, min(span.end, num_tokens) - span.start
            compressed += num_read
            for bits, count in segment.entries_by_bits.items():
                shares[bits] += count * num_read / (segment.live_end - segment.start) / segment.geometry.num_runs
        return CompressedRead(compressed, tuple(share / max(compressed, 1) for share in shares.values()))

    def blocks(self, node: Node) -> bool:
        """Whether no request may stop right after a node: it would read only a part of an unsplittable segment."""
        span = self.get(node)
        return span is not None and not span.segment.splittable and span.end < span.segment.end

    def views_of(self, owner: Node) -> list[Node]:
        """All nodes with spans of the segment that a node owns, root side first."""
        span = self.get(owner)
        assert span is not None
        segment, views = span.segment, [owner]
        while len(views) < segment.num_spans:
            views.append(next(child for child in views[-1].children.values() if self.has_part(child, segment)))
        return views

    def has_part(self, node: Node, segment: Segment) -> bool:
        """Whether a node holds a part of a segment."""
        span = self.get(node)
        return span is not None and span.segment is segment


@dataclass(eq=False, slots=True)
class OpenRange:
    """Tokens that are to be compressed, and are not yet: the uncompressed ones on the path to one node, its last.

    It has no bounds of its own: they follow from the tree, whatever is split, compressed or dropped meanwhile.

    Attributes:
        share: of its bytes that it will have; None: the budget.
        waits: it stays uncompressed until token slots are short.
        goes_on: more tokens follow: its last ones are not protected.
        prompt: observation of a prompt by which it can be ranked; None: there is none, or it was given up.
        num_bytes: memory of this observation.
        order: of its entries, or of those that it had when it was ranked; None: it was not ranked.
    """

    share: float | None
    waits: bool
    goes_on: bool = False
    prompt: Observation | None = None
    num_bytes: int = 0
    order: Order | None = None

    @property
    def is_launched(self) -> bool:
        """Whether its order was launched beside the scheduler's stream."""
        return self.order is not None and self.order.turn is not None


class PrefixTable:
    """All that is known of prefixes: the only tables keyed by nodes.

    Each change of the tree (split, drop, flush) is one function, which handles the whole record.

    ``shrinks``: segments may shrink further.

    Attributes:
        packed: owner of each segment.
        open: the open ranges by their last nodes, oldest first. A split needs no action: the node that was there
            becomes the lower half.
        shrinking: what may shrink when slots are short: owners of segments, last nodes of open ranges that wait for it.
        retained: until when nodes count as used (:meth:`CostAwareRecency.retain`), of those that were retained.
        growing: path of which segments grow now; none of them shrinks for the others.
    """

    def __init__(self, *, shrinks: bool) -> None:
        self._shrinks = shrinks
        self._awaited: dict[Node, int] = {}  # samples (``n``) of the prompt that ends there which have not begun
        self.totals = Totals()
        self.spans = Spans()
        self.packed: dict[Segment, Node] = {}
        self.open: dict[Node, OpenRange] = {}
        self.shrinking = NodeSet()
        self.retained: dict[Node, int] = {}
        self.growing: Sequence[Node] = ()

    def await_samples(self, node: Node, count: int) -> bool:
        """So many more samples of a prompt are to come; -1: one has begun. Return whether any more is to come."""
        self._awaited[node] = max(self._awaited.get(node, 0) + count, 0)
        return self._awaited[node] > 0

    def is_awaited(self, path: Sequence[Node]) -> bool:
        """Whether samples of a prompt on a path are to come, which begin with it uncompressed."""
        return any(self._awaited.get(node) for node in path)

    def stop_awaiting(self, path: Sequence[Node]) -> list[Node]:
        """No more samples of prompts on a path come; return the last nodes of those prompts that had some to come."""
        return [node for node in path if self._awaited.pop(node, 0)]

    # ---- open ranges ------------------------------------------------------------------------------------------

    @property
    def observation_bytes(self) -> int:
        """Memory of the observations of open ranges."""
        return sum(opened.num_bytes for opened in self.open.values())

    def open_range(self, last: Node, share: float | None, *, waits: bool) -> OpenRange:
        """Return the open range that ends with a node, a new one if there is none.

        One that need not wait until slots are short goes on not waiting.
        """
        opened = self.open.setdefault(last, OpenRange(share, waits))
        opened.share, opened.waits = share, opened.waits and waits
        # A range that waits is in the heap of what may shrink; the others are tried in each turn.
        if opened.waits:
            self.shrinking.add(last)
        else:
            self.shrinking.discard(last)
        return opened

    def close(self, last: Node) -> None:
        """There is nothing to do for the range that ends with a node any more."""
        if self.open.pop(last, None) is not None:
            self.shrinking.discard(last)

    def _shorten(self, last: Node) -> None:
        """The last node of a range leaves the tree: the range ends with the node above, unless others read on there."""
        opened, above = self.open.get(last), last.parent
        self.close(last)
        if opened is None or above is None or above.parent is None:
            return
        # Another path goes on there: the tokens above belong to its range, or will.
        has_others = any(child is not last for child in above.children.values())
        if has_others or above in self.spans or above in self.open:
            return
        if opened.order is not None:
            opened.order.launched()  # a ranking beside the scheduler's stream still reads the node's slots
        self.open[above] = opened
        if opened.waits:
            self.shrinking.add(above)

    # ---- changes of spans -------------------------------------------------------------------------------------

    def hold(self, nodes: Sequence[Node], segment: Segment) -> None:
        """Make consecutive nodes, root side first, the views of one segment.

        They are uncompressed, hold all spans of the segment already, or all of several that become this one.
        """
        start = segment.start
        for i, node in enumerate(nodes):
            # What was open there is this segment now, and samples that are still to come begin with it.
            self.close(node)
            self._awaited.pop(node, None)
            span, end = self.spans.get(node), start + len(node.key)
            if span is None or span.segment is not segment:
                if span is not None and span.is_owner:
                    del self.packed[span.segment]
                    self.shrinking.discard(node)
                self.spans[node] = Span(segment, start, end, is_owner=i == 0)
            start = end
        self.packed[segment] = nodes[0]
        self.resized(nodes[0])

    def resized(self, owner: Node) -> None:
        """The segment of a node has another size, so that its next step loses more, or less."""
        self.shrinking.discard(owner)
        if self._shrinks:
            self.shrinking.add(owner)

    # ---- changes of the tree ----------------------------------------------------------------------------------

    @accounting()
    def split(self, upper: Node, lower: Node) -> None:
        """Divide what is known of a node that was cut, ``lower``; ``upper`` is the new node."""
        if lower in self.retained:
            self.retained[upper] = self.retained[lower]
        span = self.spans.get(lower)
        if span is not None:
            self.totals.splits += 1
            self.spans[upper], self.spans[lower] = span.split(span.start + len(upper.key))
            if span.is_owner:
                self.packed[span.segment] = upper
                if lower in self.shrinking:
                    self.shrinking.discard(lower)
                    self.shrinking.add(upper)

    @accounting()
    def drop(self, node: Node) -> Span | None:
        """Remove what is known of a leaf that left the tree; return its span, None if it had ordinary slots.

        With an owner its segment goes. With a lower span the rest of its segment stays, for fewer slots. The rest of an
        unsplittable segment saves nothing any more, so it is dropped next.
        """
        self._shorten(node)
        self.shrinking.discard(node)
        for known in (self.retained, self._awaited):
            known.pop(node, None)
        span = self.spans.pop(node, None)
        if span is None:
            return None
        span.drop()
        if span.is_owner:
            del self.packed[span.segment]
        else:
            span.segment.is_rest = not span.segment.splittable
        return span

    def clear(self) -> None:
        """Remove everything: the tree was flushed, and :meth:`forget` was called before."""
        self.spans.clear()
        self.retained.clear()
        self.packed.clear()
        # One by one, because `clear` would leave them among the set's new nodes.
        for node in list(self.shrinking):
            self.shrinking.discard(node)

    def forget(self) -> None:
        """Close open ranges, and await no samples: the weights have changed."""
        for last in list(self.open):
            self.close(last)
        self._awaited.clear()
